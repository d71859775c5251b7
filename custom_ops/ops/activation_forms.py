"""The forms that the gated activation of an expert takes."""

from dataclasses import dataclass

from grouped_linear.meta_kernels.rules import FLOAT32_MAX


@dataclass(frozen=True)
class SwiGLU:
    """The activation between the two linear layers of an expert, from gate and up.

    With g = min(gate, limit) and u = min(max(up, -limit), limit)::

        h = g * sigmoid(alpha * g) * (u + beta)

    As it is by default that is ``silu(gate) * up``. Where a limit stops gate or up, no gradient
    passes; at the limit itself one does, as torch.clamp's did until 2.13 (2.15's does not).

    ==============================  ===========================================================
    DeepSeek-V4, GLM-5-Next, HY-V4  ``SwiGLU(limit=10.0)``, or what the model's config says
    MiniMax-M3                      ``SwiGLU(alpha=1.702, beta=1.0, limit=7.0)``
    GPT-OSS                         ``SwiGLU(alpha=1.702, beta=1.0, limit=7.0, interleaved=True)``
    ==============================  ===========================================================

    Args:
        alpha: how steep the sigmoid is.
        beta: what is added to up.
        limit: positive, or None for no limit.
        interleaved: gate and up take turns: gate_up[..., 0::2] is gate, gate_up[..., 1::2] is up.
            They are the first and the second half otherwise.

    Raises:
        ValueError: for what is no number, or one that no op takes.

    >>> import torch
    >>> from grouped_linear import ops
    >>> gate_up = torch.cat([torch.full((1, 16), 3.0), torch.full((1, 16), 20.0)], dim=1)
    >>> ops.swiglu(gate_up, torch.tensor([1]).int(), SwiGLU(limit=2.0))[0, 0]  # silu(2) * 2
    tensor(3.5232)
    """

    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None
    interleaved: bool = False

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name, number in (("alpha", self.alpha), ("beta", self.beta)):
            if not isinstance(number, int | float) or not abs(number) <= FLOAT32_MAX:
                raise ValueError(f"SwiGLU: {name} must be finite, got {number!r}")
        limit = self.limit
        if limit is not None and not (isinstance(limit, int | float) and limit > 0):
            raise ValueError(f"SwiGLU: limit must be positive, got {limit!r}")
        if not isinstance(self.interleaved, bool):
            raise ValueError(f"SwiGLU: interleaved must be True or False, got {self.interleaved!r}")

    @property
    def arguments(self) -> tuple[float, float, float | None, bool]:
        """What ops take."""
        return self.alpha, self.beta, self.limit, self.interleaved


PLAIN = SwiGLU()
