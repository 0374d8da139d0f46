"""Grader of programs: extract the program of an answer, and run it against its tests in a sandbox.

``record.metadata["tests"]`` is one of:

- ``{"kind": "asserts", "code": str, "entry_point": str or null}``: test code that uses the program's functions. With
  ``metadata["prompt"]`` (HumanEval) the answer may also continue the prompt's last function.
- ``{"kind": "stdio", "cases": [{"input": str, "output": str}, ...]}``: one run for each case.
- ``{"kind": "call", "entry_point": str, "cases": [{"arguments": list, "expected": any}, ...]}``.
"""

import functools
import re
import textwrap
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from coca_mindspeed.data.records import Record, RecordError
from coca_mindspeed.errors import GradingError
from coca_mindspeed.grading.verdict import Outcome, TalliedGrader, Verdict
from coca_mindspeed.utils.process import usable_cpus
from coca_sandbox.inside.names import undefined
from coca_sandbox.inside.process import Report
from coca_sandbox.sandbox import Limits, Sandbox, SandboxError

_MAX_WORKERS = 64
_MOST_WORKERS_BY_DEFAULT = 32
_MAX_PROGRAM_CHARACTERS = 200_000

# Extraction runs in the calling process: it is linear, and its input bounded.
MAX_ANSWER_CHARACTERS = 1_000_000

_PYTHON = {"python", "python3", "py", "py3"}
_LANGUAGE = re.compile(r"[\w+#.-]*")
_DEFINITION = re.compile(r"^(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)", re.MULTILINE)
_WORD = re.compile(r"\w+")
# Before a fence: indentation, and the marks of quotes and list items.
_CONTAINER = re.compile(r"(?:[ \t]*(?:>|(?:[-+*]|[0-9]{1,9}[.)])[ \t])){0,9}[ \t]*")
_BLANK = r"(?:[ \t\r]*(?:#[^\n]*)?\n)*"  # lines without code
_DOCSTRING = r"""[rR]?(?:"{3}[^"]*(?:"(?!"")[^"]*)*"{3}|'{3}[^']*(?:'(?!'')[^']*)*'{3}|"[^"\n]*"|'[^'\n]*')"""
_FUTURE = r"from[ \t]+__future__[ \t]+import\b(?:[ \t]*\([^()]*\)[ \t\r]*|[^\n#;()\\]*)(?:#[^\n]*)?\n"
_FUTURE_IMPORTS = re.compile(rf"({_BLANK}(?:{_DOCSTRING}[ \t\r]*\n{_BLANK})?)((?:{_FUTURE}{_BLANK})+)")

Job = dict[str, Any]


class CodeGrader(TalliedGrader):
    """Right if and only if the program passes all of its tests. Raises ``GradingError`` without a sandbox.

    Args:
        seconds: limit for one run of a program (one case, or one set of asserts) if the record sets none: wall time
            without waiting for a processor, and never less than processor time.
        total_seconds: limit for all cases of one program together.
        workers: number of sandboxes at one time; None for one per core, at most 32.
        memory_mib: for each process, and for all processes of a program together.
        processes: processes and threads of a program at one time.
        allow_unsandboxed: see :class:`~coca_sandbox.sandbox.Sandbox`.
    """

    def __init__(
        self,
        seconds: float = 10.0,
        total_seconds: float = 60.0,
        workers: int | None = None,
        memory_mib: int = 1024,
        processes: int = 32,
        allow_unsandboxed: bool = False,
    ) -> None:
        count = min(_MOST_WORKERS_BY_DEFAULT, usable_cpus()) if workers is None else workers
        if not 1 <= count <= _MAX_WORKERS:
            raise GradingError(f"the number of sandboxes should be between 1 and {_MAX_WORKERS}, found {count}")
        if seconds <= 0 or total_seconds < seconds:
            raise GradingError(f"expected 0 < seconds <= total_seconds, found {seconds:g} and {total_seconds:g}")
        super().__init__()
        self._seconds, self._total_seconds = seconds, total_seconds
        try:
            self._sandbox = Sandbox(Limits(memory_bytes=memory_mib << 20, processes=processes), allow_unsandboxed)
        except SandboxError as error:
            raise GradingError(str(error)) from error
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="sandbox")

    @staticmethod
    def check(records: Sequence[Record]) -> None:
        for record in records:
            build_job(record, "")
            check_asserts(record)
            time_limit(record, default=1.0)

    def _grade(self, records: Sequence[Record], answers: Sequence[str]) -> list[Verdict]:
        """Run no program if a record's tests are malformed (``RecordError``)."""
        jobs = [self._job(record, answer) for record, answer in zip(records, answers, strict=True)]
        reports = list(self._reports(jobs))
        self._counts["timeouts"] += sum(report.timed_out for report, _ in reports)
        return [Verdict(Outcome(report.outcome), report.reason, seconds) for report, seconds in reports]

    def outputs(self, jobs: Sequence[Job]) -> list[tuple[str | None, ...]]:
        """Digests of each program's result on each input; ``GradingError`` if a program could not be run."""
        results = []
        for report, _ in self._reports([{**job, "seconds": self._seconds} for job in jobs]):
            if report.outcome == Outcome.UNGRADABLE.value:
                raise GradingError(f"a program could not be run on the inputs of its tests: {report.reason}")
            results.append(report.outputs or (None,))
        return results

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _job(self, record: Record, answer: str) -> Job:
        too_long = ""
        if len(answer) > MAX_ANSWER_CHARACTERS:
            answer, too_long = "", f"the answer is over {MAX_ANSWER_CHARACTERS} characters"
        job = build_job(record, answer)
        if len(job["source"]) > _MAX_PROGRAM_CHARACTERS:
            too_long = f"the program is over {_MAX_PROGRAM_CHARACTERS} characters"
        return {**job, "seconds": time_limit(record, self._seconds), "too_long": too_long}

    def _reports(self, jobs: Sequence[Job]) -> Iterator[tuple[Report, float]]:
        """The report and seconds of each job, in order; ending the iteration early ends all jobs."""
        stop = threading.Event()
        try:
            yield from self._threads.map(lambda job: self._run(job, stop), jobs)
        finally:
            stop.set()

    def _run(self, job: Job, stop: threading.Event) -> tuple[Report, float]:
        started = time.perf_counter()
        if job.get("too_long"):
            return Report(Outcome.WRONG.value, job["too_long"]), 0.0
        total = job["seconds"] if job["kind"] == "asserts" else max(self._total_seconds, job["seconds"])
        try:
            report = self._sandbox.run(job, total, stop)
        except SandboxError as error:
            raise GradingError(str(error)) from error
        return report, time.perf_counter() - started


def extract_program(answer: str, wanted: Collection[str] = ()) -> str:
    """Return the program of an answer: one of its Python blocks, else one of its fenced blocks, else the whole text.

    The whole text ends at a closing fence that was never opened. Of several blocks, take the last that defines a name
    of ``wanted``; else the last that does more than use definitions of an earlier block.
    """
    blocks = [(language, code) for language, code in _fenced_blocks(answer) if code.strip()]
    codes = [code for language, code in blocks if language in _PYTHON] or [code for _, code in blocks]
    if not codes:
        text, _, last = answer.rstrip().rpartition("\n")
        return (text if re.fullmatch(r"[ \t]*(?:`{3,}|~{3,})", last) else answer).strip("\n")
    if wanted:
        names = "|".join(map(re.escape, sorted(wanted)))
        defines = re.compile(
            rf"^[ \t]*(?:async[ \t]+)?(?:def|class)[ \t]+(?:{names})\b|^(?:{names})[ \t]*=", re.MULTILINE
        )
        for code in reversed(codes):
            if defines.search(code):
                return code
    program, defined = codes[0], set(_DEFINITION.findall(codes[0]))
    for code in codes[1:]:
        own = set(_DEFINITION.findall(code))
        if own or defined.isdisjoint(_WORD.findall(code)):
            program = code
        defined |= own
    return program


def _fenced_blocks(answer: str) -> Iterator[tuple[str, str]]:
    """Language and content of each block; the last closing fence may be missing.

    As in CommonMark, a block loses the marks of the quotes and the indentation of the list items that it stands in.
    """
    fence = language = prefix = ""
    lines: list[str] = []
    for line in answer.split("\n"):
        if fence:
            line = _without_quotes(line, prefix)
            text = line.strip(" \t\r")
        else:
            text = _CONTAINER.sub("", line, count=1)
            prefix, text = line.removesuffix(text), text.rstrip(" \t\r")
        run = text[: len(text) - len(text.lstrip(text[:1]))] if text[:1] in ("`", "~") else ""
        if fence:
            if run == text and run[:1] == fence[0] and len(run) >= len(fence):
                yield language, _unindented(lines, prefix)
                fence, lines = "", []
            else:
                lines.append(line + "\n")
        elif len(run) >= 3 and not (run[0] == "`" and "`" in text[len(run) :]):
            match = _LANGUAGE.match(text[len(run) :].lstrip(" \t"))
            fence, language = run, match[0].lower() if match else ""
    if fence:
        yield language, _unindented(lines, prefix).removesuffix("\n")


def _without_quotes(line: str, prefix: str) -> str:
    """A line without the quotes' marks, as many as ``prefix`` has."""
    return re.sub(rf"(?:[ \t]*> ?){{0,{prefix.count('>')}}}", "", line, count=1)


def _unindented(lines: Sequence[str], prefix: str) -> str:
    """Lines without the indentation of their fence; where the first has less, each loses that of the first."""
    _, quote, rest = prefix.rpartition(">")
    margin = len(rest.removeprefix(" " if quote else "").expandtabs(4))
    pairs = [(line[: len(line) - len(text)].expandtabs(4), text) for line in lines for text in [line.lstrip(" \t")]]
    margin = min(margin, next((len(spaces) for spaces, text in pairs if text.strip()), 0))
    return "".join(spaces[margin:] + text for spaces, text in pairs) if margin else "".join(lines)


def build_job(record: Record, answer: str) -> Job:
    """The harness's job for one answer, without limits. Raises ``RecordError`` for malformed tests."""
    tests = record.metadata.get("tests")
    if not isinstance(tests, Mapping):
        raise RecordError(record, f"metadata['tests'] should be an object, found {type(tests).__name__}")
    kind = tests.get("kind")
    program = extract_program(answer, wanted_names(record))
    if kind == "asserts":
        entry_point = _entry_point(record, tests, required=False)
        prompt = record.metadata.get("prompt")
        if prompt is not None and not isinstance(prompt, str):
            raise RecordError(record, f"metadata['prompt'] should be a string, found {type(prompt).__name__}")
        source = program if prompt is None else _with_prompt(prompt, program, entry_point)
        code = _field(record, tests, "code", str)
        return {"kind": kind, "source": source, "tests": code, "prompt": prompt, "entry_point": entry_point}
    if kind == "stdio":
        cases = _cases(record, tests, {"input": str, "output": str})
        return {"kind": kind, "source": program, "cases": cases}
    if kind == "call":
        cases = _cases(record, tests, {"arguments": list, "expected": object})
        entry_point = _entry_point(record, tests, required=True)
        return {"kind": kind, "source": program, "cases": cases, "entry_point": entry_point}
    raise RecordError(record, f"tests of kind {kind!r}; expected 'asserts', 'stdio' or 'call'")


def check_asserts(record: Record) -> None:
    """Raise ``RecordError`` for test code that does not compile or uses nothing of the program."""
    tests = record.metadata.get("tests")
    if not isinstance(tests, Mapping) or tests.get("kind") != "asserts":
        return
    try:
        wanted = undefined(_field(record, tests, "code", str), (), _entry_point(record, tests, required=False))
    except (SyntaxError, ValueError) as error:
        raise RecordError(record, f"tests['code'] does not compile: {error}") from error
    if not wanted.program:
        raise RecordError(record, "tests['code'] uses nothing of the program")


def wanted_names(record: Record) -> frozenset[str]:
    """Names of which the record's tests call at least one; empty if the program is a script."""
    tests = record.metadata.get("tests")
    if not isinstance(tests, Mapping):
        return frozenset()
    if isinstance(entry_point := tests.get("entry_point"), str):
        return frozenset({entry_point})
    code = tests.get("code")
    return _called(code) if isinstance(code, str) else frozenset()


@functools.lru_cache(maxsize=1_024)
def _called(code: str) -> frozenset[str]:
    try:
        return undefined(code).called
    except (SyntaxError, ValueError):
        return frozenset()  # reported by the harness


def time_limit(record: Record, default: float) -> float:
    """Time limit in seconds for one run; ``RecordError`` if the record's is not a positive number."""
    seconds = record.metadata.get("time_limit")
    if seconds is None:
        return default
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < float("inf"):
        raise RecordError(record, f"metadata['time_limit'] should be seconds above 0, found {seconds!r}")
    return float(seconds)


def _with_prompt(prompt: str, program: str, entry_point: str | None) -> str:
    name = re.escape(entry_point) if entry_point else r"\w+"
    if re.search(rf"^(?:async\s+)?def\s+{name}\b|^{name}\s*=|^class\s", program, re.MULTILINE):
        # A whole function: it replaces the prompt's unfinished one. Imports from __future__ stand before all others.
        future = _FUTURE_IMPORTS.match(program)
        before, imports, rest = ("", "", program) if future is None else (*future.groups(), program[future.end() :])
        return f"{imports}{prompt}\n    pass\n\n{before}{rest}"
    body = textwrap.dedent(program)
    body = program if body.startswith((" ", "\t")) else textwrap.indent(body, "    ")
    return prompt + ("" if prompt.endswith("\n") else "\n") + body


def _entry_point(record: Record, tests: Mapping[str, Any], required: bool) -> str | None:
    name = tests.get("entry_point")
    if name is None and not required:
        return None
    if not isinstance(name, str) or not name.isidentifier():
        raise RecordError(record, f"tests['entry_point'] should be the name of a function, found {name!r}")
    return name


def _field(record: Record, tests: Mapping[str, Any], name: str, kind: type) -> Any:
    if name not in tests or not isinstance(tests[name], kind):
        raise RecordError(record, f"tests[{name!r}] should be {kind.__name__}, found {type(tests.get(name)).__name__}")
    return tests[name]


def _cases(record: Record, tests: Mapping[str, Any], fields: Mapping[str, type]) -> list[dict[str, Any]]:
    cases = _field(record, tests, "cases", list)
    if not cases:
        raise RecordError(record, "tests['cases'] is empty, so that any program would pass")
    for number, case in enumerate(cases, start=1):
        for name, kind in fields.items():
            if not isinstance(case, Mapping) or name not in case or not isinstance(case[name], kind):
                raise RecordError(record, f"case {number} should have {name!r} of type {kind.__name__}")
    return [{name: case[name] for name in fields} for case in cases]
