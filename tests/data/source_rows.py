"""Rows in each publisher's schema, with the columns that are read; the contents are our own."""

import json
from typing import Any

BIG_MATH: list[dict[str, Any]] = [
    {
        "problem": "What is $3^4$?",
        "answer": "81",
        "source": "orca_math",
        "domain": ["Mathematics -> Algebra -> Prealgebra"],
        "llama8b_solve_rate": 0.90625,
    },
    {
        "problem": "Find all real $x$ with $x^2 = 2$.",
        "answer": "\\pm\\sqrt{2}",
        "source": "olympiads",
        "domain": None,
        "llama8b_solve_rate": None,
    },
]


def taco_row(**changes):
    """A TACO row with these columns changed."""
    row = {
        "question": "Read two integers and print their sum.",
        "starter_code": "",
        "input_output": json.dumps({"inputs": ["1 2\n", "-5 5\n"], "outputs": ["3\n", "0\n"]}),
        "difficulty": "MEDIUM",
        "source": "codeforces",
        "time_limit": "2.0 seconds",
    }
    return {**row, **changes}


TACO_CALL = taco_row(
    question="Write a function that doubles a number.",
    starter_code="def double(n):\n\t",
    input_output=json.dumps({"fn_name": "double", "inputs": [[2], [-7]], "outputs": [[4], [-14]]}),
    difficulty="EASY",
    time_limit=None,
    source="codewars",
)

GSM8K = [
    {
        "question": "A box holds 12 eggs. How many eggs are in 100 boxes?",
        "answer": "Each box holds 12 eggs.\nThat is 12 * 100 = <<12*100=1200>>1200 eggs.\n#### 1,200",
    },
    {"question": "It was 3 degrees and fell by 8. How cold is it?", "answer": "3 - 8 = -5\n#### -5"},
]

MATH500 = [
    {
        "problem": "Compute $\\frac{1}{2} + \\frac{1}{3}$.",
        "answer": "\\frac{5}{6}",
        "subject": "Prealgebra",
        "level": 2,
        "unique_id": "test/prealgebra/1.json",
    }
]

#: The same AIME-like problem as five source_rows would ship it.
AIME = {
    "HuggingFaceH4": {"problem": "Find the number of widgets.", "answer": "025"},
    "Maxwell-Jia": {"Problem": "Find the number of widgets.", "Answer": 25},
    "math-ai": {"problem": "Find the number of widgets.", "answer": "25", "id": "0"},
    "MathArena": {"problem": "Find the number of widgets.", "answer": 25},
    "OpenCompass": {"origin_prompt": "Find the number of widgets.", "gold_answer": "25"},
    "OpenCompass 2025": {"question": "Find the number of widgets.", "answer": "25^\\circ"},
}


def mbpp_row(task_id=11, **changes):
    """A row of sanitized MBPP."""
    row = {
        "task_id": task_id,
        "prompt": f"Write a function that adds {task_id} to a number.",
        "code": f"def add(n):\n  return n + {task_id}",
        "test_imports": ["import math"],
        "test_list": [f"assert add(1) == {task_id + 1}", f"assert math.isclose(add(0.5), {task_id}.5)"],
    }
    return {**row, **changes}


HUMANEVAL = [
    {
        "task_id": "HumanEval/0",
        "prompt": 'def triple(n: int) -> int:\n    """Three times n."""\n',
        "canonical_solution": "    return 3 * n\n",
        "test": "def check(candidate):\n    assert candidate(2) == 6\n",
        "entry_point": "triple",
    }
]

SIMPLEQA = [
    {
        "problem": 'Which town is called "the quiet one"?',
        "answer": "Nowhere, Province",
    }
]

HOTPOTQA_AUTHORS = {
    "_id": "5a7a06935542990198eaf050",
    "answer": "yes",
    "question": "Are both planets in the solar system?",
    "supporting_facts": [["Mars", 0], ["Venus", 0]],
    "context": [["Mars", ["Mars is a planet.", " It is red."]], ["Venus", ["Venus is a planet."]]],
    "type": "comparison",
    "level": "hard",
}
HOTPOTQA_HUB = {
    **{name: HOTPOTQA_AUTHORS[name] for name in ("answer", "question", "type", "level")},
    "id": "5a7a06935542990198eaf050",
    "supporting_facts": {"title": ["Mars", "Venus"], "sent_id": [0, 0]},
    "context": {
        "title": ["Mars", "Venus"],
        "sentences": [["Mars is a planet.", " It is red."], ["Venus is a planet."]],
    },
}
TRIVIAQA_HUB = {
    "question": "Which planet is the red one?",
    "question_id": "tc_1",
    "question_source": "https://example.org/",
    "answer": {
        "aliases": ["Mars (planet)", "Planet Mars", "Mars"],
        "value": "Mars",
    },
}
TRIVIAQA_AUTHORS = {
    "Answer": {
        "Aliases": ["Mars (planet)", "Planet Mars", "Mars"],
        "HumanAnswers": ["The planet Mars"],
        "Value": "Mars",
    },
    "Question": "Which planet is the red one?",
    "QuestionId": "tc_1",
    "QuestionSource": "https://example.org/",
}
