"""What it takes to have KV again, in seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds; a token's prefill costs ``token + depth * (tokens before it)``, its load ``load``.

    Writing a token to a remote store costs the server ``store``, and so does fetching it.

    Only ratios matter to a policy; the defaults are those of an 8-billion-parameter model of 32 layers and
    hidden size 4096 at 400 TFLOP/s, with 128 KiB of KV a token at 25 GB/s.
    """

    token: float = 4.0e-5
    depth: float = 1.31e-9
    load: float = 5.2e-6
    store: float = 5.2e-6

    def recompute(self, start: float, tokens: float) -> float:
        """Prefill of ``tokens`` behind ``start`` others."""
        return tokens * (self.token + self.depth * (start + tokens / 2))

    def scaled(self, tokens: int) -> CostModel:
        """The same costs where one unit of length stands for ``tokens``."""
        return CostModel(
            self.token * tokens, self.depth * tokens * tokens, self.load * tokens, self.store * tokens
        )
