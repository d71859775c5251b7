# SPDX-License-Identifier: Apache-2.0
"""Importing the package changes nothing of another's."""

import json
import sys
from pathlib import Path

from support.commands import run
from support.documents import ROOT

# What other packages keep for everyone: torch, and transformers where it is installed. Each entry
# is a set of words.
SNAPSHOT = """
import copyreg, importlib.util, json, logging, sys, warnings
import torch, torch._dynamo, torch._functorch.config, torch._inductor.config
import torch.nn.modules.module as hooks
from torch.utils import _pytree, flop_counter
transformers = importlib.util.find_spec("transformers") is not None
if transformers:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

def values(module):
    return [f"{name} {id(value)}" for name, value in vars(module).items()]

def snapshot():
    configs = torch._dynamo.config, torch._inductor.config, torch._functorch.config
    return {
        "warnings": [repr(f) for f in warnings.filters],
        "logging": [repr(h) for h in logging.root.handlers] + [str(logging.root.level)],
        "configs": [f"{k} {v!r}" for c in configs for k, v in c.get_config_copy().items()],
        "hooks": [f"{n} {v!r}" for n, v in vars(hooks).items() if n.startswith("_global_")],
        "Tensor and Module": values(torch.Tensor) + values(torch.nn.Module),
        "pickle": [str(c) for c in copyreg.dispatch_table],
        "safe to load": [f"{c.__module__}" for c in torch.serialization.get_safe_globals()],
        "pytree": [f"{c.__module__}.{c.__qualname__}" for c in _pytree.SUPPORTED_NODES],
        "flops": [str(op) for op in flop_counter.flop_registry],
        "importers": [repr(i) for i in sys.meta_path + sys.path_hooks],
        "modes": [
            torch._C._get_autograd_fallback_mode(), torch.get_float32_matmul_precision(),
            str((torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled())),
        ],
        "transformers": [*ALL_EXPERTS_FUNCTIONS, *AUTO_QUANTIZER_MAPPING] if transformers else [],
    }

before = snapshot()
import grouped_linear
after = snapshot()
changed = {}
for what, old in before.items():
    new = [word for word in after[what] if word not in old]
    gone = [word for word in old if word not in after[what]]
    changed[what] = [w for w in new if not w.startswith("grouped_linear")] + gone
print(json.dumps({what: words for what, words in changed.items() if words}))
"""


def test_importing_changes_no_other_package(tmp_path: Path) -> None:
    done = run([sys.executable, "-W", "ignore", "-c", SNAPSHOT], cwd=tmp_path, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == {}


def test_importing_needs_torch_alone() -> None:
    """Also here, where folders have the names of packages."""
    code = "import sys, grouped_linear; print(grouped_linear.__version__, *sys.modules)"
    done = run([sys.executable, "-c", code], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    names = done.stdout.split()
    assert not {"transformers", "torchtitan", "transformer_engine", "safetensors"} & set(names)
