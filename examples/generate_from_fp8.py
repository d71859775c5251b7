# SPDX-License-Identifier: Apache-2.0
"""Generate text from a checkpoint whose experts are in FP8.

    pip install transformers accelerate
    python examples/generate_from_fp8.py
    python examples/generate_from_fp8.py --checkpoint NAME_OR_FOLDER  # real, on a GPU

Without --checkpoint a small random Mixtral is written first, in the format of
DeepSeek-V3's and Qwen's FP8 checkpoints: e4m3 with a float32 scale for each 128 x 128.

On a GPU transformers loads experts in FP8 and `convert` reads them as they are. On a
CPU transformers dequantizes what it loads, and `convert(weights="fp8")` quantizes it
again: the same bytes here, where scales are powers of two.
"""

import argparse
import time
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig

from grouped_linear import convert

CONFIG = MixtralConfig(
    vocab_size=256,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=8,
    eos_token_id=None,
)


def write_small_checkpoint(folder: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16)
    convert(model, weights="fp8")
    model.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--checkpoint", help="a folder, or a name of the Hugging Face hub"
    )
    parser.add_argument("--prompt", default="A mixture of experts is")
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with TemporaryDirectory() as folder:
        if options.checkpoint is None:
            write_small_checkpoint(folder)
        model = AutoModelForCausalLM.from_pretrained(
            options.checkpoint or folder, dtype=torch.bfloat16, device_map=device
        )
    print(convert(model, weights="fp8"))
    if options.checkpoint is None:  # a token is a byte
        tokens = torch.tensor([list(options.prompt.encode())], device=device)
    else:
        tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
        tokens = tokenizer(options.prompt, return_tensors="pt").input_ids.to(device)

    model.generate(
        tokens, max_new_tokens=2, do_sample=False
    )  # the first call allocates
    start = time.perf_counter()
    written = model.generate(tokens, max_new_tokens=options.tokens, do_sample=False)[0]
    seconds = time.perf_counter() - start
    experts = [p for name, p in model.named_parameters() if ".experts." in name]
    if options.checkpoint is None:
        print(f"random weights write {bytes(written[tokens.size(1) :].tolist())!r}")
    else:
        print(tokenizer.decode(written))
    print(f"\n{'experts in FP8, MiB':24}{sum(p.nbytes for p in experts) / 2**20:10.1f}")
    print(f"{'elements of experts':24}{sum(p.numel() for p in experts):10,}")
    print(f"{'tokens a second':24}{(len(written) - tokens.size(1)) / seconds:10.1f}")


if __name__ == "__main__":
    main()
