"""Run by hand on a machine with a GPU: fast mode against its definitions, and against a CPU.

    python tests/gpu/check_fast.py

Each kernel of fused.cu is held against elementwise.py's own lines on drawn numbers; a whole small model, its
decode steps as CUDA graphs and a training step against the same on the CPU. Exit status 1 if one is off.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu.sources import refuse_bare_python, use_sources

use_sources()
if __name__ == "__main__":
    refuse_bare_python("cuda")

import numpy as np  # noqa: E402
import torch  # noqa: E402

from lanes.batches import Sequences  # noqa: E402
from lanes.tiny_models import GEMMA3, QWEN3, open_model, write_model  # noqa: E402
from mens_core.micro_batches import Example  # noqa: E402
from mens_core.ops import AttentionSpec, Batch  # noqa: E402
from mens_core.trainer import TrainerConfig  # noqa: E402
from mens_torch_cuda.fast import elementwise as ew  # noqa: E402
from mens_torch_cuda.fast import fused  # noqa: E402
from mens_torch_cuda.fast.attention import Places, decode_attention  # noqa: E402
from mens_torch_cuda.fast.ops import FastOps, product, wide_product  # noqa: E402
from mens_torch_cuda.fast.trainer import FastTrainer  # noqa: E402
from mens_torch_cuda.gpu import find_gpu  # noqa: E402
from vox_plugin_api.backend import BackendError  # noqa: E402
from vox_plugin_api.train_messages import AdapterConfig, OptimizerConfig, Schedule  # noqa: E402

ROUNDING = 2.0**-8
"""One rounding to bfloat16, of the largest number nearby."""
failures = 0


def report(name: str, off: float, allowed: float) -> None:
    global failures
    is_right = off <= allowed
    failures += not is_right
    print(f"{'ok  ' if is_right else 'FAIL'} {name}: off by {off:.3g}, allowed {allowed:.3g}", flush=True)


def compare(name: str, call: Callable[..., object], *given: object, **named: object) -> None:
    """The kernel and the definition on the same numbers."""
    found = call(*given, **named)
    kept = dict(fused._functions)
    fused._functions.clear()
    expected = call(*given, **named)
    fused._functions.update(kept)
    pairs = zip(_all(found), _all(expected), strict=True)
    for i, (a, b) in enumerate(pairs):
        scale = float(b.float().abs().max())
        report(f"{name} {i}", float((a.float() - b.float()).abs().max()) / scale, 2 * ROUNDING)


def _all(made: object) -> list[torch.Tensor]:
    return [made] if isinstance(made, torch.Tensor) else [part for part in made if part is not None]  # type: ignore[attr-defined]


def heads_backward(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, whole: torch.Tensor, *angles: torch.Tensor
) -> torch.Tensor:
    """Into the rows that x is a slice of."""
    heads, width = x.shape[1:]
    dx = torch.zeros_like(whole).view(len(x), heads + 2, width)
    ew.heads_backward(dy, x, w, 1e-6, *angles, dx[:, 1 : heads + 1])
    return dx


def decoding(
    some: Any, width: int, groups: int, each: int, window: int | None, softcap: float | None
) -> None:
    """Attention over blocks in any order, and what is stored there."""
    heads, lengths = groups * each, (1, 128, 129, 700, 65)
    keys, values = some(20, groups, 128, width), some(20, groups, 128, width)
    tables = np.full((5, 8), -1, np.int32)
    free = iter(np.random.default_rng(1).permutation(20).tolist())
    for table, length in zip(tables, lengths, strict=True):
        for i in range(-(-length // 128)):
            table[i] = next(free)
    batch = Batch(
        token_ids=np.zeros(5, np.int32),
        positions=np.array(lengths, np.int32) - 1,
        starts=np.arange(6, dtype=np.int32),
        block_tables=tables,
        logit_rows=np.arange(5, dtype=np.int32),
    )
    places = Places.of(batch, torch.device("cuda"))
    spec = AttentionSpec(heads, groups, width, width**-0.5, window, softcap)
    name = f"decode {width} x {groups} x {each}, window {window}, softcap {softcap}"
    compare(name, decode_attention, some(5, heads * width), keys, values, places, spec)
    whole = some(5, 3 * groups * width).view(5, 3 * groups, width)
    compare(
        f"append {width} x {groups}", stored, whole[:, groups : 2 * groups], whole[:, :groups], keys, places
    )


def stored(k: torch.Tensor, v: torch.Tensor, like: torch.Tensor, places: Places) -> list[torch.Tensor]:
    """Blocks with these keys and values, and nothing else."""
    keys, values = torch.zeros_like(like), torch.zeros_like(like)
    ew.append(k, v, keys, values, places.blocks, places.offsets)
    return [keys, values]


def kernels() -> None:
    draw = torch.Generator(device="cuda").manual_seed(7)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw, device="cuda").to(torch.bfloat16)

    for width in (64, 1024, 2560, 4096, 8192):
        x, y, w = some(37, width), some(37, width), some(width).float() + 1
        compare(f"norm {width}", ew.norm, x, w, 1e-6)
        compare(f"add_norm {width}", ew.add_norm, x, y, w, 1e-6)
        compare(f"norm_backward {width}", ew.norm_backward, y, x, w, 1e-6, x)
        compare(f"norm_backward alone {width}", ew.norm_backward, y, x, w, 1e-6)
    for width, heads in ((16, 3), (64, 5), (128, 8), (256, 2)):
        whole, w = some(29, (heads + 2) * width), some(width).float() + 1
        x = whole.view(29, heads + 2, width)[:, 1 : heads + 1]
        turns = torch.rand(50, width // 2, generator=draw, device="cuda") * 6
        at = torch.randint(0, 50, (29,), generator=draw, device="cuda")
        angles = turns.cos(), turns.sin(), at
        compare(f"heads {width}", ew.heads, x, w, 1e-6, *angles)
        dy = some(heads, 29, width).transpose(0, 1)
        compare(f"heads_backward {width}", heads_backward, dy, x, w, whole, *angles)
    for is_silu in (True, False):
        gate_up, dy = some(33, 2 * 1032), some(33, 1032)
        compare(f"gate silu={is_silu}", ew.gate, gate_up, is_silu=is_silu)
        compare(f"gate_backward silu={is_silu}", ew.gate_backward, dy, gate_up, is_silu=is_silu)
    for width, groups, each in ((64, 3, 1), (128, 8, 2), (128, 8, 4), (256, 1, 4), (128, 2, 7)):
        for window, softcap in ((None, None), (100, None), (None, 3.0)):
            decoding(some, width, groups, each, window, softcap)
    for rows, columns in ((4096, 4096), (1000, 1024), (30, 56), (151936, 1024)):
        x, weight = some(1, columns), some(rows, columns)
        compare(f"product {rows} x {columns}", product, x, weight)
        compare(f"wide product {rows} x {columns}", wide_product, x, weight)
    logits, targets = some(9, 151936).float() * 4, torch.randint(0, 151936, (9,), device="cuda")
    compare("loss", ew.loss, logits, targets, backward=True)
    compare("loss alone", ew.loss, logits, targets, backward=False)


SHAPE = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 64, "vocab_size": 512}


def steps(ops: FastOps, folder: Path) -> list[np.ndarray]:
    """Logits of prefill, of a mixed step, and of decode steps of changing width."""
    model, made = open_model(folder, ops).model, []
    rng, sequences, cache = np.random.default_rng(2), Sequences(), model.new_cache(12)
    ids = [rng.integers(0, 500, 400).tolist() for _ in range(3)]
    for cuts in ([100, 30, 7], [200, 31, 8], [201, 130, 9], *([202 + i, 131 + i, 10 + i] for i in range(5))):
        at = [sequences._length.get(i, 0) for i in range(3)]
        rows = [(i, ids[i][at[i] : cuts[i]]) for i in range(3)]
        made.append(ops.to_host(model.forward(sequences.step(rows), cache).logits))
    alone = [sequences.step([(0, [ids[1][token]])]) for token in range(3)]
    made += [ops.to_host(model.forward(batch, cache).logits) for batch in alone]
    return made


TARGETS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]


def losses(ops: FastOps, folder: Path, dropout: float) -> list[float]:
    config = TrainerConfig(
        adapter=AdapterConfig(rank=8, alpha=16.0, targets=TARGETS, dropout=dropout),
        optimizer=OptimizerConfig(learning_rate=1e-3), schedule=Schedule(), seed=1,
    )  # fmt: skip
    rng = np.random.default_rng(4)
    examples = [Example(tuple(rng.integers(0, 500, n).tolist()), tuple(range(2, n))) for n in (140, 60, 60)]
    trainer, made = FastTrainer(open_model(folder, ops).model, ops.device, config), []
    for _ in range(4):
        run = trainer.train_step(examples)
        while True:
            try:
                next(run)
            except StopIteration as stop:
                made += [stop.value.loss, stop.value.gradient_norm]
                break
    return made


def models() -> None:
    for family, shape in (("qwen3", QWEN3), ("gemma3", GEMMA3)):
        with tempfile.TemporaryDirectory() as folder:
            path = write_model(Path(folder), {**shape, **SHAPE}, seed=3)
            found = steps(FastOps(torch.device("cuda"), facts={}), path)
            expected = steps(FastOps(torch.device("cpu"), facts={}), path)
            for i, (a, b) in enumerate(zip(found, expected, strict=True)):
                scale = float(np.abs(b).max())
                # Twice the depth's roundings: each side is off from the exact one by its own.
                report(f"{family} step {i}", float(np.abs(a - b).max()) / scale, 24 * ROUNDING)
            made = losses(FastOps(torch.device("cuda"), facts={}), path, 0.0)
            wanted = losses(FastOps(torch.device("cpu"), facts={}), path, 0.0)
            for i, (a, b) in enumerate(zip(made, wanted, strict=True)):
                report(f"{family} training {i}", abs(a - b) / abs(b), 6 * ROUNDING)
            again = losses(FastOps(torch.device("cuda"), facts={}), path, 0.1)
            report(f"{family} dropout", 0.0 if all(map(np.isfinite, again)) else 1.0, 0.0)


def main() -> int:
    """Return 1 if something is off; 0 too where there is no GPU, which it says."""
    try:
        gpu = find_gpu()
    except BackendError as problem:
        print(f"SKIPPED: {problem.error.message}. {problem.error.remedy}")
        print("no check of the CUDA lane was run")
        return 0
    fused.use(gpu.capability)
    kernels()
    models()
    print(f"{failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
