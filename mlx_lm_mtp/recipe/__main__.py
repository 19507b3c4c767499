"""Make the embedded pair: without arguments everything, on a GPU in minutes."""

import argparse
import sysconfig
from pathlib import Path

STAGES = ("prepare", "target", "drafter", "measure")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m mlx_lm_mtp.recipe", description=__doc__
    )
    parser.add_argument(
        "stages",
        nargs="*",
        help=f"some of {', '.join(STAGES)}; all by default",
    )
    parser.add_argument(
        "--library",
        type=Path,
        default=Path(sysconfig.get_paths()["stdlib"]),
        help="folder of Python sources; this Python's standard library by default",
    )
    parser.add_argument("--out", type=Path, default=Path("pair"))
    parser.add_argument("--data", type=Path, help="OUT/data by default")
    parser.add_argument("--target-steps", type=int, default=7500)
    parser.add_argument("--drafter-steps", type=int, default=10000)
    parser.add_argument("--own-rows", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    args = parser.parse_args()
    for stage in args.stages:
        if stage not in STAGES:
            parser.error(f"{stage!r} is none of {', '.join(STAGES)}")
    return args


def main() -> None:
    args = parse()
    stages = args.stages or STAGES
    data = args.data or args.out / "data"
    if "prepare" in stages:
        from .corpus import prepare

        prepare(args.library, data)
    if {"target", "drafter"} & set(stages):
        train(args, stages, data)
    if "measure" in stages:
        from .measure import measure

        measure(args.out, data / "prompts.json")


def train(args: argparse.Namespace, stages: list[str], data: Path) -> None:
    import torch

    from .drafter import train_drafter
    from .folders import load_target
    from .target import train_target
    from .trainer import Plan

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    print(f"torch {torch.__version__}, {device}", flush=True)
    size = {"batch": args.batch, "length": args.length}
    if "target" in stages:
        train_target(
            data, args.out, Plan(args.target_steps, learning_rate=5e-3, **size), device
        )
    if "drafter" in stages:
        target = load_target(args.out, device)
        plan = Plan(args.drafter_steps, learning_rate=4e-3, **size)
        train_drafter(target, data, args.out, plan, args.own_rows)


main()
