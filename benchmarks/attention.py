"""Time of tree attention against SDPA with a dense mask, forward and backward, interleaved: `python benchmarks/attention.py`."""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from slipstream.packing.attention.blockwise import blockwise_attention
from slipstream.packing.attention.layout import TreeLayout

ROWS = {  # prompts, tokens of a prompt, completions per prompt, tokens of a completion
    "demo: 130 samples, about 350 tokens": (16, 6, 8, 2),
    "2k: 4 groups of 8": (4, 96, 8, 52),
    "4k: 4 groups of 16": (4, 128, 16, 56),
    "8k: 4 groups of 16": (4, 512, 16, 96),
    "8k: 64 short samples, nothing shared": (64, 0, 1, 128),
    "4k: one sample": (1, 0, 1, 4096),
}


def row(prompts: int, prompt: int, completions: int, completion: int) -> np.ndarray:
    parent: list[int] = []
    for _ in range(prompts):
        root = len(parent)
        parent += [-1, *range(root, root + prompt - 1)] if prompt else []
        for _ in range(completions):
            start = len(parent)
            parent += [root + prompt - 1 if prompt else -1, *range(start, start + completion - 1)]
    return np.array(parent)


def seconds(attention: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: list[Tensor], grad: Tensor) -> float:
    begun = time.perf_counter()
    torch.autograd.grad(attention(*inputs), inputs, grad)
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--window", type=int)
    args = parser.parse_args()
    scale, groups = args.head_dim**-0.5, args.heads // args.kv_heads
    for name, shape in ROWS.items():
        layout = TreeLayout(row(*shape))
        sizes = [(heads, layout.size, args.head_dim) for heads in (args.heads, args.kv_heads, args.kv_heads)]
        inputs = [torch.randn(1, *size, requires_grad=True) for size in sizes]
        grad = torch.randn(1, *sizes[0])
        mask = layout.attends(torch.device("cpu"), args.window)

        def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor = mask) -> Tensor:
            k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
            return scaled_dot_product_attention(q, k, v, mask, scale=scale)

        def tree(q: Tensor, k: Tensor, v: Tensor, layout: TreeLayout = layout) -> Tensor:
            return blockwise_attention(q, k, v, layout, scale, args.window)

        difference = (dense(*inputs) - tree(*inputs)).abs().max().item()
        pairs = [(seconds(dense, inputs, grad), seconds(tree, inputs, grad)) for _ in range(args.rounds)]
        ratio = statistics.median(d / t for d, t in pairs)
        d, t = (statistics.median(times) * 1e3 for times in zip(*pairs, strict=True))
        print(
            f"{name}: {layout.size} tokens, {len(layout.segments)} segments: dense {d:.2f} ms, tree {t:.2f} ms, "
            f"ratio {ratio:.2f} (largest difference {difference:.1e})",
            flush=True,
        )


if __name__ == "__main__":
    main()
