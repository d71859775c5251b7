"""Fine-tune with LoRA on attention and on the experts, which lie frozen in FP8.

    pip install transformers peft
    python examples/lora_fp8_experts.py

Experts are most of a mixture-of-experts model. `convert(model, weights="fp8")` keeps
them in FP8 alone, a byte an element. PEFT's adapters learn beside them and on them:
with `use_grouped_adapters` each row goes through the small factors of its expert, and
no weight of W + B A is ever made. The adapter is saved as PEFT saves it.

On a GPU the same script runs there. With a checkpoint of yours in the place of the
small random model, load it, convert it and move it as below: the experts then take half
of BF16's memory.
"""

import argparse
import tempfile

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tqdm import tqdm
from transformers import MixtralConfig, MixtralForCausalLM

from grouped_linear import convert
from grouped_linear.integrations.peft import use_grouped_adapters

CONFIG = MixtralConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=8,
)
LORA = LoraConfig(
    r=8,
    lora_alpha=16,
    target_modules=["q_proj", "v_proj"],
    target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
)


def mib_of(parameters: list[torch.Tensor]) -> float:
    return sum(p.nbytes for p in parameters) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = MixtralForCausalLM(CONFIG).to(torch.bfloat16)  # or from_pretrained
    experts = {n: p for n, p in model.named_parameters() if ".experts." in n}
    before = mib_of(list(experts.values()))
    model.requires_grad_(False)
    print(convert(model, weights="fp8"))
    after = mib_of([model.get_parameter(name) for name in experts])
    model = get_peft_model(model, LORA).to(device)
    print("grouped adapters on", *use_grouped_adapters(model), sep="\n  ")

    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-2)
    tokens = torch.randint(256, (8, 32), device=device)
    losses = []
    for _ in tqdm(range(steps), desc="steps"):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    with tempfile.TemporaryDirectory() as folder:  # of the adapter alone
        model.save_pretrained(folder)
        again = PeftModel.from_pretrained(model.unload(), folder)
    use_grouped_adapters(again)
    with torch.no_grad():
        loaded = again(input_ids=tokens, labels=tokens).loss.item()

    print(f"\n{'experts in BF16, MiB':24}{before:8.2f}")
    print(f"{'experts in FP8, MiB':24}{after:8.2f}")
    print(f"{'adapters, MiB':24}{mib_of(adapters):8.2f}")
    print(f"{'first loss':24}{losses[0]:8.3f}")
    print(f"{'last loss':24}{losses[-1]:8.3f}")
    print(f"{'loss, saved and loaded':24}{loaded:8.3f}")


if __name__ == "__main__":
    main()
