"""The form of the prompts that a model was trained with, and the file beside a model that carries it.

A prompt is a system prompt, a question and the instruction of the question's category, rendered by a chat template.  A
model is used with the form that it was trained with, and a certificate holds for that form alone.
"""

import hashlib
import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationError

from coca_mindspeed.algorithm.methods import METHODS, MethodSettings
from coca_mindspeed.algorithm.parsing import CATEGORY_INSTRUCTIONS
from coca_mindspeed.config.schema import Section
from coca_mindspeed.config.values import TemplateVariables
from coca_mindspeed.errors import ConfigError, DataError, did_you_mean, validation_problems
from coca_mindspeed.utils.custom_code import is_custom
from coca_mindspeed.utils.directories import MARKER, read_marker, run_of_model
from coca_mindspeed.utils.json_files import read_object, write_json

ComputeDtype = Literal["float32", "bfloat16"]
#: The file of an exported model; a run has the same content in its marker, ``prompt``.
PROMPT_FILE = "coca_prompt.json"
_DIGITS = 16  # of a digest


def instruction_text(instruction: str) -> str:
    """The text that follows a question: one that does not begin with white space follows after one space."""
    return f" {instruction}" if instruction and not instruction[0].isspace() else instruction


def contains_prompt(text: str, system_prompt: str) -> bool:
    """Whether ``text`` contains ``system_prompt``, up to white space."""
    return " ".join(system_prompt.split()) in " ".join(text.split())


def join_system(system_prompt: str | None, more: str | None) -> str | None:
    """``system_prompt`` before another system message; one that contains the other is taken as it is."""
    if not system_prompt or not more:
        return system_prompt or more or None
    if contains_prompt(more, system_prompt):
        return more
    return system_prompt if system_prompt.endswith(f"\n\n{more}") else f"{system_prompt}\n\n{more}"


class PromptForm(Section):
    """The parts of a prompt besides its question; ``template_variables`` are in the saved chat template already."""

    system_prompt: str | None = Field(description="null: none")
    #: Text behind each question, by category; null: it differs from question to question, and belongs to it.
    instructions: dict[str, Annotated[str, AfterValidator(instruction_text)] | None]
    template_variables: TemplateVariables = Field(default_factory=dict, description="of the chat template")
    decimals: int | None = Field(None, ge=1, le=6, description="exact digits of a confidence; null: any")
    thinking: bool = Field(False, description="the confidence begins a thought; the answer follows </think>")

    def digest(self, instruction: str | None) -> str:
        """Identify the prompts with one ``instruction`` (None: a part of each question); 16 hexadecimal digits."""
        parts = self.model_dump(mode="json", exclude={"instructions"})
        # A part that is added later, and that a prompt does without, leaves the digest as it is.
        parts = {name: value for name, value in parts.items() if value} | {"instruction": instruction}
        text = json.dumps(parts, sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]

    def digests(self) -> dict[str, str]:
        """The digest of each category's prompts."""
        return {category: self.digest(instruction) for category, instruction in self.instructions.items()}

    def category(self, name: str | None, *, key: str) -> str:
        """Return the category that ``name`` names, or the only one.

        Raises ConfigError, which begins with ``key``: an unknown category, several and no name, or none at all.
        """
        categories = ", ".join(self.instructions)
        if not self.instructions:
            raise ConfigError(f"{key}: the form names no category's instruction; export the run again with its data")
        if name is None and len(self.instructions) > 1:
            raise ConfigError(f"{key}: the model was trained with several categories; name one of {categories}")
        if name is not None and name not in self.instructions:
            near = did_you_mean(name, self.instructions)
            raise ConfigError(f"{key}: the model was trained with {categories}, found {name!r}{near}")
        return next(iter(self.instructions)) if name is None else name


def _our_method(name: str) -> str:
    """A file from elsewhere never names code."""
    if name not in METHODS:
        raise ValueError(f"expected a method of ours: {', '.join(METHODS)}")
    return name


_OurMethod = Annotated[str, AfterValidator(_our_method)]


class TrainedPrompt(Section):
    """The content of :data:`PROMPT_FILE`, and of ``prompt`` in a run's marker."""

    version: Literal[2] = Field(2, description="of this file's form")
    form: PromptForm
    method: _OurMethod | None = Field(description="whose responses it writes; null: one of the author's own")
    max_confidence_tokens: int = Field(16, ge=1, description="segment length of an invalid confidence")
    max_new_tokens: int = Field(ge=1, description="of a response in training")
    compute_dtype: ComputeDtype | None = Field(None, description="of the training; null: not recorded")

    @classmethod
    def of_training(
        cls, form: PromptForm, method: MethodSettings, max_new_tokens: int, compute_dtype: ComputeDtype | None = None
    ) -> "TrainedPrompt":
        """The content of the file of a training by ``method``."""
        return cls(
            form=form,
            method=None if is_custom(method.name) else method.name,
            max_confidence_tokens=method.max_confidence_tokens,
            max_new_tokens=max_new_tokens,
            compute_dtype=compute_dtype,
        )

    def write(self, directory: Path) -> None:
        """Write the file of an exported model."""
        write_json(directory / PROMPT_FILE, self.model_dump(mode="json"))


class _EarlierMethod(Section):
    name: _OurMethod
    confidence_decimals: int | None = Field(None, ge=1, le=6)
    max_confidence_tokens: int = Field(16, ge=1)


class _EarlierPrompt(Section):
    """The file of earlier versions, with category and instruction of the first question only."""

    method: _EarlierMethod
    max_new_tokens: int = Field(ge=1)
    category: str | None = None
    instruction: str | None = None  # null: the category's default

    def upgraded(self) -> TrainedPrompt:
        method, instructions = self.method, dict[str, str | None]()
        if self.category is not None:
            default = CATEGORY_INSTRUCTIONS.get(self.category, "")
            instructions[self.category] = default if self.instruction is None else self.instruction
        system_prompt = METHODS[method.name].system_prompt
        form = PromptForm(system_prompt=system_prompt, instructions=instructions, decimals=method.confidence_decimals)
        return TrainedPrompt(
            form=form,
            method=method.name,
            max_confidence_tokens=method.max_confidence_tokens,
            max_new_tokens=self.max_new_tokens,
        )


def prompt_file(path: Path) -> Path | None:
    """The file that ``path`` is or holds; that of the run, for a model in a run's directory; None: there is none."""
    if path.is_file():
        return path
    for place in filter(None, (path, run_of_model(path))):
        if "form" in ((read_marker(place, "run") or {}).get("prompt") or {}):
            return place / MARKER
        if (file := place / PROMPT_FILE).is_file():
            return file
    return None


def read_prompt_file(file: Path) -> TrainedPrompt:
    """Read :data:`PROMPT_FILE`, also of earlier versions, or that part of a run's marker.

    Raises ConfigError with every problem, a line each, by its key.
    """
    try:
        content = read_object(file)
    except DataError as error:
        raise ConfigError(str(error)) from error
    content = (content.get("prompt") or {}) if content.get("kind") == "run" else content
    earlier = "form" not in content and isinstance(content.get("method"), dict)
    try:
        if earlier:
            return _EarlierPrompt.model_validate(content).upgraded()
        return TrainedPrompt.model_validate(content)
    except ValidationError as error:
        problems = validation_problems(error)
        lines = "\n".join(f"{file}: {problem}" for problem in problems)
        raise ConfigError(f"{lines}\nexport the model again, or restore the file", problems) from error
