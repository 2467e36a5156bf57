"""``kvxfer load``: how much load a deployment holds within its latency limits.

Decides flags, words on screen and exit codes: 0 good; 1 the load test did not measure what it claims to, or nothing
answered; 2 wrong usage; 130 interrupted, when what ran was reported all the same. What is measured, judged and written
is of ``kvxfer.load``, which a program can call in the same way.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import pathlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvxfer import open_files
from kvxfer.cli import load_shown as shown
from kvxfer.cli.console import ProgressBar
from kvxfer.cli.flags import add_flags, options_from
from kvxfer.cli.interrupts import CommandInterrupts
from kvxfer.errors import UsageError
from kvxfer.load.importers.read import ImportFormat
from kvxfer.load.options import DriveOptions, GoalOptions, OutOptions, TargetOptions, WorkloadOptions
from kvxfer.load.search import SearchOptions
from kvxfer.load.served import kill_all
from kvxfer.load.sweep_points import SweepOptions

if TYPE_CHECKING:  # they need what an extra brings: imported when a load test runs
    from kvxfer.load.conclude import LoadResult
    from kvxfer.load.execute import LoadPlan

SENT = (("where the requests go", TargetOptions), ("what is sent, and when", WorkloadOptions))
SENDING = (*SENT, ("how it is sent", DriveOptions))
JUDGED = (("what is good", GoalOptions), ("where the artefacts go", OutOptions))
SEARCHED = (("how the rate is sought", SearchOptions),)

Options = tuple[tuple[str, type[Any]], ...]


@dataclasses.dataclass(frozen=True)
class LoadCommand:
    """One of the commands below ``kvxfer load``."""

    summary: str
    options: Options
    run: Callable[[argparse.Namespace, CommandInterrupts], int]
    argument: tuple[str, str] | None = None
    """Name and help of what stands without a flag."""


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    children = parser.add_subparsers(dest="load_command", metavar="|".join(COMMANDS), required=True)
    for name, one in COMMANDS.items():
        said = one.summary[0].upper() + one.summary[1:] + "."
        child = children.add_parser(name, help=one.summary, description=said)
        child.allow_abbrev = False
        if one.argument is not None:
            name, said = one.argument
            child.add_argument(name, type=pathlib.Path, metavar=name.upper(), help=said)
        for title, options in one.options:
            add_flags(child.add_argument_group(title), options)


def run(args: argparse.Namespace) -> int:
    open_files.raise_limit()
    with CommandInterrupts(on_forced=kill_all) as interrupts:
        code = COMMANDS[args.load_command].run(args, interrupts)
        return interrupts.exit_code or code


def plan_of(args: argparse.Namespace) -> LoadPlan:
    from kvxfer.load.execute import LoadPlan

    return LoadPlan(
        options_from(TargetOptions, args), options_from(WorkloadOptions, args), options_from(DriveOptions, args)
    )


def _run(args: argparse.Namespace, interrupts: CommandInterrupts) -> int:
    from kvxfer.load import conclude
    from kvxfer.load.execute import execute

    plan, goal, out = plan_of(args), options_from(GoalOptions, args), options_from(OutOptions, args)
    conclude.limits_of(goal)
    with conclude.opened(out) as directory, _progress() as progress:
        tell = shown.told(progress, "sending")
        made = execute(plan, on_record=directory.append, on_progress=tell, stop=interrupts.stop)
        progress.close()
        return _end(conclude.conclude("run", [conclude.judge(made, goal)], directory, out))


def _search(args: argparse.Namespace, interrupts: CommandInterrupts) -> int:
    from kvxfer.load import conclude, seek

    plan, goal, out = plan_of(args), options_from(GoalOptions, args), options_from(OutOptions, args)
    options = options_from(SearchOptions, args)
    seek.check(goal, plan)
    with conclude.opened(out) as directory, _progress() as progress:
        sought = seek.seek(
            plan,
            goal,
            options,
            on_probe=lambda probe: shown.probe(probe, options.probes_max),
            on_judged=lambda judged: shown.judged_run(progress, judged),
            on_record=directory.append,
            on_progress=shown.told(progress, "sending"),
            stop=interrupts.stop,
        )
        verdicts, extra = [sought.verdict, *sought.findings], sought.to_json()
        ended = conclude.conclude(
            "search", sought.judged, directory, out, overall=verdicts, extra=extra, counts_runs=False
        )
        return _end(ended)


def _sweep(args: argparse.Namespace, interrupts: CommandInterrupts) -> int:
    from kvxfer.load import compare, conclude

    plan, goal, out = plan_of(args), options_from(GoalOptions, args), options_from(OutOptions, args)
    options, search = options_from(SweepOptions, args), options_from(SearchOptions, args)
    if plan.target.url != TargetOptions().url:
        raise UsageError("a sweep starts the services that it tests: --url has no place in it")
    with conclude.opened(out) as directory, _progress() as progress:
        found = compare.compare(
            options,
            plan,
            goal,
            search,
            directory=directory,
            progress=lambda name: shown.told(progress, name),
            on_point=shown.starts,
            on_judged=lambda judged: shown.judged_run(progress, judged),
            on_result=lambda made, tested: shown.point(made),
            stop=interrupts.stop,
        )
        shown.comparison(found)
        return _end(compare.conclude_sweep(found, options, directory, out))


def _import(args: argparse.Namespace, interrupts: CommandInterrupts) -> int:
    from kvxfer.load import conclude
    from kvxfer.load.importers.read import join_router_log, read_results

    goal, out, options = (
        options_from(GoalOptions, args),
        options_from(OutOptions, args),
        options_from(ImportOptions, args),
    )
    conclude.limits_of(goal)
    runs = read_results(args.file, options.tool)
    conclude.check_told(runs, goal)
    if options.router_log:
        joined = join_router_log(runs, pathlib.Path(options.router_log))
        requests = sum(len(run.records) for run in runs)
        print(f"kvxfer: the router's log has an account of {joined} of {requests} requests", file=sys.stderr)
    with conclude.opened(out) as directory:
        for record in (record for run in runs for record in run.records):
            directory.append(record)
        return _end(conclude.conclude("import", [conclude.judge(run, goal) for run in runs], directory, out))


def _report(args: argparse.Namespace, interrupts: CommandInterrupts) -> int:
    from kvxfer.load import artefacts
    from kvxfer.load.report.write import write_report

    stored = artefacts.read(args.directory)
    for note in stored.notes:
        print(f"kvxfer: {note}", file=sys.stderr)
    print(f"The report lies at {write_report(args.directory, stored)}")
    return 0


def _end(result: LoadResult) -> int:
    shown.result(result)
    return 1 if result.is_failure else 0


def _progress() -> contextlib.closing[ProgressBar]:
    return contextlib.closing(ProgressBar())


@dataclasses.dataclass(frozen=True)
class ImportOptions:
    """What wrote the results."""

    tool: ImportFormat | None = dataclasses.field(
        default=None, metadata={"help": "that wrote the file (default: found out from what is in it)"}
    )
    router_log: str = dataclasses.field(
        default="",
        metadata={
            "help": "log of a kvxfer router (--log-style=json) that the requests went through: its accounts of them",
            "metavar": "FILE",
        },
    )


COMMANDS = {
    "run": LoadCommand("send a workload, and say what came of it", (*SENDING, *JUDGED), _run),
    "search": LoadCommand(
        "seek the highest rate at which enough requests are good", (*SENDING, *SEARCHED, *JUDGED), _search
    ),
    "sweep": LoadCommand(
        "start the service anew for each split, policy or lane, and compare them",
        (("what is compared", SweepOptions), *SENDING, *SEARCHED, *JUDGED),
        _sweep,
    ),
    "import": LoadCommand(
        "judge the results of another tool: aiperf, guidellm, vllm bench, inference-perf",
        (("what wrote the results", ImportOptions), *JUDGED),
        _import,
        ("file", "the tool's file, or the directory it made"),
    ),
    "report": LoadCommand("write report.html anew", (), _report, ("directory", "of a load test")),
}
