"""Products of matrices in compiled programs: the library that torch calls against seminode's own code, in microseconds.

    python -m benchmarks.products [--threads 1] [--repeats 300]

Each program multiplies ten pairs of matrices in float32; the time of its fastest call is divided by ten. Programs of
both kinds take turns. `x` has the layout of activations, `w` that of a layer's weights, `g` that of the gradient of its
outputs: the product x wᵀ is the layer, g w the gradient of its inputs, gᵀ x that of its weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from unittest import mock

import torch
from torch import Tensor

from seminode._compile import products
from seminode._compile.inductor import compile_graph
from seminode._compile.library import Building

from .detest import table
from .overhead import seconds

#: Of the layers of the small problem, of sampling, and of the fields of the pendulum and of the neural CDE.
LAYERS = (
    (256, 4, 32),
    (256, 32, 32),
    (256, 64, 64),
    (256, 128, 128),
    (256, 400, 400),
    (256, 40, 1890),
    (1024, 40, 1890),
)
PAIRS = 10


def kinds(batch: int, inputs: int, outputs: int) -> dict[str, Callable[[], tuple[Tensor, Tensor]]]:
    """The three products of a layer, as functions that make a pair of factors."""
    return {
        "x wᵀ": lambda: (torch.randn(batch, inputs), torch.randn(outputs, inputs).T),
        "g w": lambda: (torch.randn(batch, outputs), torch.randn(outputs, inputs)),
        "gᵀ x": lambda: (torch.randn(batch, outputs).T, torch.randn(batch, inputs)),
    }


def program(given: Sequence[Tensor], own: bool) -> Callable[[list[Tensor]], object]:
    def function(*inputs: Tensor) -> list[Tensor]:
        return [torch.mm(a, b) for a, b in zip(inputs[::2], inputs[1::2], strict=True)]

    with mock.patch.object(products, "library_is_slow", return_value=own):
        made = compile_graph(function, given)
        if isinstance(made, Building):
            made.wait()
    return made


def microseconds(given: Sequence[Tensor], repeats: int) -> list[float]:
    """Of one product by the library, and by our own code."""
    programs = [program(given, own) for own in (False, True)]
    best = [float("inf")] * len(programs)
    for _ in range(repeats):
        for i, run in enumerate(programs):
            best[i] = min(best[i], seconds(lambda run=run: run(list(given))))
    return [1e6 * time / PAIRS for time in best]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.products", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=300)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows = []
    for layer in LAYERS:
        for name, make in kinds(*layer).items():
            given = [x for _ in range(PAIRS) for x in make()]
            library, own = microseconds(given, options.repeats)
            batch, inputs, outputs = layer
            rows.append(
                [f"{batch} × {inputs:,} to {outputs:,}", name, f"{library:.3g}", f"{own:.3g}", f"{library / own:.2f}"]
            )
            print("  ".join(rows[-1]), flush=True)
    print("\n" + table(("layer", "product", "library, µs", "own, µs", "library / own"), rows))


if __name__ == "__main__":
    main()
