"""Small files of our own in the published format of each data set, and crafted responses with known metrics."""

import csv
import json
from dataclasses import dataclass

# (stated confidence, is the answer right); None states it in a way that is not valid.
CRAFTED = (
    ("0.9", True),
    ("0.9", True),
    ("0.3", False),
    ("1.0", True),
    ("0.70", False),
    ("0.6", True),
    ("0.1", False),
    ("0", False),
    ("0.8", True),
    (None, True),
    ("0.3", True),
    ("0.7", False),
)
CODE = "def solve_{i}(x):\n    return x + {i}\n"


@dataclass(frozen=True)
class Question:
    """A question that carries its own marker, so that the served model can recognise it."""

    marker: str
    stated: str | None
    right: bool
    reply: str


def _reply(stated, answer):
    head = "<confidence> 90% </confidence>" if stated is None else f"<confidence> {stated} </confidence>"
    # TriviaQA's grader reads the first line; of an invalid response that is the line with the confidence.
    return f"{head} {answer}" if answer.startswith("The answer is") else f"{head}\n{answer}"


def _json_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_benchmarks(root):
    """Write all eight data sets below ``root`` and return their questions, each with its crafted reply."""
    data = root / "data"
    names = ("gsm8k", "math500", "aime24", "aime25", "mbpp_sanitized", "humaneval", "simpleqa", "triviaqa")
    questions = {}
    for offset, name in enumerate(names):
        crafted = [CRAFTED[(i + offset) % len(CRAFTED)] for i in range(len(CRAFTED) - offset % 3)]
        questions[name] = [
            Question(f"[{name} {i}]", stated, right, _reply(stated, _answer(name, i, right)))
            for i, (stated, right) in enumerate(crafted)
        ]
    gsm8k = [
        {"question": f"{q.marker} How many?", "answer": f"So it is 1,00{i}.\n#### 1,00{i}"}
        for i, q in enumerate(questions["gsm8k"][:10])
    ]
    gsm8k += [{"question": f"{q.marker} How many?", "answer": f"#### 10{i}"} for i, q in enumerate(questions["gsm8k"])][
        10:
    ]
    _json_lines(data / "gsm8k" / "test.jsonl", gsm8k)
    _json_lines(data / "gsm8k" / "train.jsonl", gsm8k)
    math = {
        str(i): {"problem": f"{q.marker} Find it.", "solution": f"It is $\\boxed{{\\frac{{{i}}}{{7}}}}$."}
        for i, q in enumerate(questions["math500"])
    }
    (data / "math").mkdir(parents=True)
    (data / "math" / "test_prm800k_500.json").write_text(json.dumps(math))
    aime24 = [
        {"origin_prompt": f"{q.marker} Find it.", "gold_answer": f"{i}"} for i, q in enumerate(questions["aime24"])
    ]
    _json_lines(data / "aime.jsonl", aime24)
    aime25 = [{"question": f"{q.marker} Find it.", "answer": f"{i}"} for i, q in enumerate(questions["aime25"])]
    _json_lines(data / "aime2025" / "aime2025.jsonl", aime25)
    mbpp = [
        {
            "source_file": "ours",
            "task_id": i,
            "prompt": f"Write a function to add. {marker}",
            "code": CODE.format(i=i),
            "test_imports": [],
            "test_list": [f"assert solve_{i}(1) == {i + 1}", f"assert solve_{i}(5) == {i + 5}"],
        }
        # OpenCompass keeps the first seven rows as examples.
        for i, marker in enumerate(["example"] * 7 + [q.marker for q in questions["mbpp_sanitized"]], start=-7)
    ]
    _json_lines(data / "mbpp" / "sanitized-mbpp.jsonl", mbpp)
    humaneval = [
        {
            "task_id": f"HumanEval/{i}",
            "prompt": f'def solve_{i}(x: int) -> int:\n    """Add {i}. {q.marker}"""\n',
            "entry_point": f"solve_{i}",
            "canonical_solution": f"    return x + {i}\n",
            "test": f"def check(candidate):\n    assert candidate(2) == {i + 2}\n    assert candidate(0) == {i}\n",
        }
        for i, q in enumerate(questions["humaneval"])
    ]
    _json_lines(data / "humaneval" / "human-eval-v2-20210705.jsonl", humaneval)
    (data / "simpleqa").mkdir()
    with (data / "simpleqa" / "simple_qa_test_set.csv").open("w", newline="") as file:
        rows = [("{}", f"{q.marker} Who?", f"Person {i}") for i, q in enumerate(questions["simpleqa"])]
        csv.writer(file).writerows([("metadata", "problem", "answer"), *rows])
    (data / "triviaqa").mkdir()
    for split in ("dev", "test"):
        with (data / "triviaqa" / f"trivia-{split}.qa.csv").open("w", newline="") as file:
            rows = [
                (f"{q.marker} Who", str([f"person {i}x", f"nick {i}x"])) for i, q in enumerate(questions["triviaqa"])
            ]
            csv.writer(file, delimiter="\t").writerows(rows)
    return questions


def _answer(name, i, right):
    """The answer segment; a wrong one is of the right form."""
    if name == "gsm8k":
        value = (f"1,00{i}" if i < 10 else f"10{i}") if right else "5"
        return f"Step by step.\nTherefore the final answer is \\boxed{{{value}}}."
    if name == "math500":
        return f"Thus \\boxed{{{'' if right else '-1-'}\\frac{{{i}}}{{7}}}}."
    if name in ("aime24", "aime25"):
        return f"Thus \\boxed{{{i if right else 999}}}."
    if name == "mbpp_sanitized":
        return f"```python\n{CODE.format(i=i) if right else CODE.format(i=i).replace('+', '-1-')}```"
    if name == "humaneval":
        if i % 2:  # the body alone, as a completion of the prompt
            return f"```python\n    return x {'+' if right else '-1-'} {i}\n```"
        return f"```python\n{CODE.format(i=i) if right else CODE.format(i=i).replace('+', '-1-')}```"
    if name == "simpleqa":
        return f"Person {i}" if right else ("I do not know." if i % 2 else "Somebody else")
    return f"The answer is Nick {i}x" if right else "The answer is nobody"
