"""`neox-launch doctor`: checks the hosts of a job before training.

Agents are started by the same tools and with the same addresses as for a run, and their workers run
`neox_model.doctor`; this module compares their results. The first finding is whether they could be started
and joined.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from neox_config.pluralize import pluralize
from neox_launcher.controller.launch import supervise_plan
from neox_launcher.plan.plan import LaunchPlan
from neox_launcher.protocol.messages import own_version
from neox_launcher.protocol.outcome import Outcome
from neox_launcher.resources.host import name_some, some_lines

__all__ = ["Diagnosis", "Finding", "diagnose", "examine_hosts"]

# With a larger difference, log and file times of the hosts cannot be compared.
_MOST_SKEW_SECONDS = 1.0
_START_SECONDS = 20.0
_SOFTWARE = ("python", "torch", "deepspeed", "neox-model", "numpy")

Facts = Mapping[str, Any]


# Kind of folders that are written to: what is good, and what to do otherwise.
_FOLDERS = {
    "folders": (
        "writable, and the same on all hosts",
        "choose a folder on a file system that all hosts share and can write to",
    ),
    "local_folders": (
        "writable, and each host has its own",
        "choose a folder on the local disk of each host that can be written to",
    ),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check.

    Args:
        name: what was checked.
        found: description of the result.
        remedy: what to do if it is not good.
        is_good: whether a job can run with it.
    """

    name: str
    found: str
    remedy: str = ""
    is_good: bool = True


_NEXT = "whether the layout computes the same as one process: neox-launch verify-layout FILE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All findings, in the order of the checks."""

    findings: tuple[Finding, ...]

    @property
    def is_good(self) -> bool:
        """Whether all findings are good."""
        return all(finding.is_good for finding in self.findings)

    def __str__(self) -> str:
        width = max(len(finding.name) for finding in self.findings)
        lines = []
        for finding in self.findings:
            first, *more = finding.found.splitlines()
            lines.append(f"{finding.name:<{width}}  {'ok ' if finding.is_good else 'BAD'}  {first}")
            lines += [f"{'':<{width}}       {line}" for line in more]
        bad = [finding for finding in self.findings if not finding.is_good]
        if not bad:
            return "\n".join([*lines, "", "verdict: these hosts can run the job", _NEXT])
        lines += ["", f"verdict: {len(bad)} problem{'s' if len(bad) > 1 else ''} to fix first"]
        return "\n".join([*lines, *(f"  {finding.name}: {finding.remedy}" for finding in bad)])


def examine_hosts(plan: LaunchPlan) -> Diagnosis:
    """Start the workers of the plan with the doctor program, and compare their results.

    Raises:
        LaunchError: the cluster's tools cannot be started.
    """
    orders = replace(plan.orders(), hang_timeout=None, log_dir=None)
    within = min(_START_SECONDS, plan.resolved.config.launch.start_timeout)
    outcome = supervise_plan(plan, orders, start_timeout=within)
    return diagnose(outcome, hosts=len(plan.world.hosts))


def diagnose(outcome: Outcome, *, hosts: int) -> Diagnosis:
    """Compare the results of the workers.

    Args:
        outcome: outcome of a launch of the doctor program.
        hosts: number of hosts in the plan.
    """
    findings = [_started(outcome, hosts)]
    if outcome.facts or outcome.other_versions:
        findings.append(_launcher_versions(outcome))
    if outcome.facts:
        for check in _CHECKS:
            findings += check(outcome.facts)
    return Diagnosis(findings=tuple(findings))


def _started(outcome: Outcome, hosts: int) -> Finding:
    name, joined = "reach and join", pluralize(len(outcome.facts), "worker")
    if outcome.first_failure is None:
        return Finding(name, f"{pluralize(hosts, 'host')} started, {joined} joined")
    remedy = "if the hosts reach the launcher but not each other, check firewalls and master-addr"
    return Finding(name, str(outcome.first_failure), f"see the error above; {remedy}", is_good=False)


def _launcher_versions(outcome: Outcome) -> Finding:
    """Compare the versions with which the agents introduced themselves; others are not let in."""
    here = own_version()
    hosts: dict[str, list[str]] = defaultdict(list)
    for host, theirs in outcome.other_versions.items():
        hosts[theirs].append(host)
    others = [f"{theirs} on {name_some(sorted(names))}" for theirs, names in hosts.items()]
    found = "\n".join([f"{here} on this machine", *others]) if others else here
    return Finding(
        "neox-launcher", found, "install the same version of neox-launcher on all hosts", is_good=not others
    )


def _clocks(facts: Mapping[int, Facts]) -> Iterator[Finding]:
    skews = {fact["host"]: float(fact["clock"]) for fact in facts.values()}
    apart = max(skews.values()) - min(skews.values())
    latest, earliest = max(skews, key=skews.__getitem__), min(skews, key=skews.__getitem__)
    found = f"at most {apart:.1f} s apart"
    if apart > _MOST_SKEW_SECONDS:
        found += f": {latest} is ahead of {earliest}"
    remedy = "synchronize the clocks with NTP (check chronyc tracking, timedatectl)"
    yield Finding("clocks", found, remedy, is_good=apart <= _MOST_SKEW_SECONDS)


def _software(facts: Mapping[int, Facts]) -> Iterator[Finding]:
    for name in (*_SOFTWARE, "driver", "cudnn"):
        is_good, found = _same(facts, lambda fact, name=name: str(fact[name]))  # type: ignore[misc]
        yield Finding(name, found, f"install the same version of {name} on all hosts", is_good=is_good)
    # Outside the bounds of our packages; they may work: the contracts decide.
    if any("untested" in fact for fact in facts.values()):
        _, found = _same(facts, lambda fact: str(fact.get("untested", "none")))
        yield Finding("untested versions", found)


def _contracts(facts: Mapping[int, Facts]) -> Iterator[Finding]:
    """List what of torch and DeepSpeed is not as neox-model expects; one worker per host has checked it."""
    checked = {rank: fact for rank, fact in facts.items() if "contracts" in fact}
    broken: dict[str, list[str]] = defaultdict(list)
    for fact in checked.values():
        if not fact["contracts"]["hold"]:
            for line in fact["contracts"]["found"].splitlines():
                broken[line].append(fact["host"])
    if checked:
        lines = [f"on {name_some(hosts)}, {line}" for line, hosts in broken.items()]
        _, held = _same(checked, lambda fact: str(fact["contracts"]["found"]))
        remedy = "install the versions that were tested; python -m neox_model.contracts repeats the check"
        yield Finding("contracts", "\n".join(lines) or held, remedy, is_good=not broken)


def _gpus(facts: Mapping[int, Facts]) -> Iterator[Finding]:
    def counted_gpus(fact: Facts) -> str:
        names = fact["gpus"]
        return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "none"

    is_good, found = _same(facts, counted_gpus)
    wrong = [
        f"the GPU of rank {rank} on {fact['host']}: {fact['gpu_error']}"
        for rank, fact in facts.items()
        if fact["gpu_error"]
    ]
    remedy = "exclude the host or the slot (exclude), and check nvidia-smi there"
    yield Finding("GPUs", "\n".join([found, *some_lines(wrong)]), remedy, is_good=is_good and not wrong)


def _attention(facts: Mapping[int, Facts]) -> Iterator[Finding]:
    """Compare the attention backends that PyTorch chooses, which depend on versions and the environment."""
    known = {rank: fact for rank, fact in facts.items() if fact.get("attention")}
    if known:

        def by_kind(fact: Facts) -> str:
            return ", ".join(f"{name} ({kind} layers)" for kind, name in fact["attention"].items())

        is_good, found = _same(known, by_kind)
        notes = dict.fromkeys(note for fact in known.values() for note in fact["attention_notes"])
        remedy = "use the same GPUs, PyTorch, cuDNN and environment on all hosts"
        yield Finding("attention backend", "\n".join([found, *notes]), remedy, is_good=is_good)


def _files(facts: Mapping[int, Facts]) -> Iterator[Finding]:
    for path in sorted({path for fact in facts.values() for path in fact["files"]}):
        is_good, found = _same(facts, lambda fact, path=path: str(fact["files"].get(path)))  # type: ignore[misc]
        is_there = all("bytes of" in str(fact["files"].get(path)) for fact in facts.values())
        remedy = "put the file on a file system that all hosts share, or the same file on each host"
        yield Finding(path, found, remedy, is_good=is_good and is_there)


def _folders(facts: Mapping[int, Facts]) -> Iterator[Finding]:
    for kind, (good, remedy) in _FOLDERS.items():
        checked = [fact for fact in facts.values() if kind in fact]
        for name in sorted({name for fact in checked for name in fact[kind]}):
            wrong = {fact["host"]: fact[kind][name] for fact in checked if fact[kind][name]}
            found = "\n".join(some_lines([f"on {host}, {what}" for host, what in wrong.items()]))
            yield Finding(name, found or good, remedy, is_good=not wrong)


def _all_reduce(facts: Mapping[int, Facts]) -> Iterator[Finding]:
    measured = {rank: fact["all_reduce"] for rank, fact in facts.items() if "all_reduce" in fact}
    if measured:
        slowest = min(measured.values(), key=lambda one: one["bytes_per_second"])
        found = (
            f"{slowest['bytes'] / 2**20:.0f} MiB in {slowest['seconds'] * 1e3:.1f} ms, "
            f"{slowest['bytes_per_second'] / 1e9:.2f} GB/s per link (bus bandwidth)"
        )
        yield Finding("all-reduce", found)


_CHECKS = (_clocks, _software, _contracts, _gpus, _attention, _files, _folders, _all_reduce)


def _same(facts: Mapping[int, Facts], value: Callable[[Facts], str]) -> tuple[bool, str]:
    """Return whether a value is the same on all hosts, and the value or the values by host."""
    hosts: dict[str, dict[str, None]] = defaultdict(dict)
    for fact in facts.values():
        hosts[value(fact)][fact["host"]] = None
    if len(hosts) == 1:
        return True, next(iter(hosts))
    return False, "\n".join(
        some_lines([f"{what} on {name_some(list(names))}" for what, names in hosts.items()])
    )
