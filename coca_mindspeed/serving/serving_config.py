"""The file that ``coca-mindspeed serve`` reads: backends, tiers, what each confidence means, caps and limits."""

import difflib
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, Field, ValidationError, model_validator

from coca_mindspeed.config.schema import Section
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.serving.decision import Action, AnswerGate, Band, CostRule, Rule, ThresholdRule
from coca_mindspeed.yaml_text import YamlError, read_yaml


class ListenConfig(Section):
    """Where the proxy listens, and who may ask."""

    host: str = Field("127.0.0.1", description="0.0.0.0 for every interface; set api_key_env then")
    port: int = Field(8080, ge=0, le=65535, description="0: any free one")
    api_key_env: str | None = Field(None, description="environment variable that holds the key clients must show")


class BackendConfig(Section):
    """An OpenAI-compatible server."""

    url: str = Field(pattern=r"^https?://", description="up to and including /v1")
    model: str = Field(min_length=1, description="its name there")
    api_key_env: str | None = Field(None, description="environment variable that holds its key")
    dialect: Literal["openai", "vllm"] = Field(
        "openai", description="vllm: also vLLM-Ascend and our own server; token ids and counts are asked for"
    )
    context_tokens: int | None = Field(
        None, ge=1, description="longest sequence, prompt included, where /v1/models does not say it (max_model_len)"
    )
    first_token_s: float = Field(60.0, gt=0, description="longest wait for the first piece, and for a connection")
    between_tokens_s: float = Field(30.0, gt=0, description="longest wait between two pieces")


class BandConfig(Section):
    """Confidences from ``at_least`` up to the band above."""

    at_least: float = Field(ge=0, le=1, description="lowest confidence of the band")
    action: Action = Field(description="answer, refuse, escalate, sample or hook")
    samples: int = Field(0, ge=0, description="how many to vote over, for sample")


class ConfidenceConfig(Section):
    """Which number is the confidence."""

    source: Literal["stated", "log_probs", "mean"] = Field(
        "stated", description="of the one sample; its digits' expected value; the mean of several samples"
    )
    samples: int = Field(1, ge=1, le=64, description="for mean: how many, about ten tokens each")
    alternatives: int = Field(
        20, ge=1, le=20, description="for log_probs: tokens named beside each; no more than the engine allows"
    )

    @model_validator(mode="after")
    def _several_for_a_mean(self) -> "ConfidenceConfig":
        if (self.source == "mean") != (self.samples > 1):
            raise ValueError("samples: 2 or more belong to source 'mean' and to no other")
        return self


class GateConfig(Section):
    """A second look, at the whole answer; it is held back until then."""

    mean_log_prob: float | None = Field(None, le=0, description="least mean log-prob of the answer's tokens, nats")
    cut_off: bool = Field(True, description="whether an answer at the length limit may pass")
    otherwise: Literal["refuse", "escalate"] = Field("escalate", description="what to do with one that does not pass")


class TierConfig(Section):
    """One step of the ladder, from the cheapest model to the dearest."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$", description="in headers, logs and metrics")
    backend: str = Field(description="a name of the section backends")
    price: float = Field(1.0, ge=0, description="of a generated token, in the unit of all costs")
    states_confidence: bool = Field(True, description="false: a plain model, whose answers are given as they are")
    system_prompt: str | None = Field(None, description="null: the paper's; it stands before the client's own")
    bands: list[BandConfig] | None = Field(None, description="thresholds; null: by the costs")
    invalid: Action = Field("escalate", description="what to do without a valid confidence")
    confidence: ConfidenceConfig = ConfidenceConfig()
    style: Literal["one_request", "two_requests"] = Field(
        "one_request", description="abort what is not wanted; or stop at the tag and go on by token ids (dialect vllm)"
    )
    temperature: float | None = Field(None, ge=0, description="null: the client's")
    calibration: str | None = Field(None, description="a map of `coca-mindspeed calibrate`; needs temperature")
    max_confidence_tokens: int = Field(32, ge=4, description="allowance for the confidence beyond max_tokens")
    answer_tokens: float | None = Field(None, gt=0, description="of an average answer, for the costs")
    accuracy: float | None = Field(None, ge=0, le=1, description="of its answers, for the costs of the tier below")
    after_answer: GateConfig | None = Field(None, description="a second gate; null: none")

    @model_validator(mode="after")
    def _consistent(self) -> "TierConfig":
        if self.calibration is not None and self.temperature is None:
            raise ValueError("temperature: a calibration map holds at one temperature; set it")
        if self.bands is not None:
            ThresholdRule([_band(band) for band in self.bands], self.invalid)
        return self


class CostsConfig(Section):
    """What outcomes cost, in the unit of the tiers' prices."""

    error: float = Field(ge=0, description="a wrong answer")
    refusal: float = Field(ge=0, description="no answer")


class CapsConfig(Section):
    """The most that one request may spend."""

    escalations: int = Field(8, ge=0, description="further tiers")
    samples: int = Field(8, ge=0, le=64, description="further requests side by side")
    hooks: int = Field(1, ge=0, description="calls of the hook")
    tokens: int | None = Field(None, ge=1, description="generated over all tiers; null: no cap")
    exhausted: Literal["answer", "refuse"] = Field("answer", description="in place of what a cap does not allow")


class HookConfig(Section):
    """An HTTP call whose result goes into the prompt: retrieval, or a tool."""

    url: str = Field(pattern=r"^https?://", description="gets POST {messages, confidence, tier}, returns {context}")
    timeout_s: float = Field(10.0, gt=0, description="longest wait")
    max_characters: int = Field(20_000, ge=1, description="a longer context is an error")


class ShadowConfig(Section):
    """Decide and log, but let one tier answer everything."""

    serve: str = Field(description="the tier that answers")


class LogConfig(Section):
    """requests.jsonl and labelled.jsonl."""

    directory: str = Field(description="made if it is not there")
    texts: bool = Field(False, description="questions and answers too")


class DriftConfig(Section):
    """An alarm from labels that come later."""

    error: float | None = Field(None, gt=0, lt=1, description="certified error of what is answered; null: not watched")
    run_length: float = Field(10_000, gt=1, description="labels between false alarms, on average at least")


class LimitsConfig(Section):
    """What a client may ask of the proxy."""

    request_bytes: int = Field(4_000_000, ge=1, description="a larger request is refused")
    body_s: float = Field(30.0, gt=0, description="longest wait for a request's body")
    concurrent: int = Field(256, ge=1, description="requests at once; further ones get 429")
    deadline_s: float = Field(600.0, gt=0, description="of a whole request")


class ServingConfig(Section):
    """The whole file."""

    name: str = Field("coca", min_length=1, description="the model that clients ask for")
    listen: ListenConfig = ListenConfig()
    backends: dict[str, BackendConfig] = Field(min_length=1, description="by name")
    tiers: list[TierConfig] = Field(min_length=1, description="from the cheapest to the dearest")
    costs: CostsConfig | None = Field(None, description="for tiers without bands")
    caps: CapsConfig = CapsConfig()
    on_error: Literal["escalate", "fail"] = Field(
        "escalate", description="what a tier's failure means before anything was answered"
    )
    refusal: str = Field("I am not sure enough to answer this.", min_length=1, description="the text of a refusal")
    hook: HookConfig | None = None
    shadow: ShadowConfig | None = None
    log: LogConfig | None = None
    drift: DriftConfig = DriftConfig()
    limits: LimitsConfig = LimitsConfig()

    @model_validator(mode="after")
    def _names_that_are_there(self) -> "ServingConfig":
        names = [tier.name for tier in self.tiers]
        if len(set(names)) < len(names):
            raise ValueError(f"tiers: names should differ, found {', '.join(names)}")
        if self.shadow is not None and self.shadow.serve not in names:
            raise ValueError(f"shadow.serve: expected one of {', '.join(names)}, found {self.shadow.serve!r}")
        for index, tier in enumerate(self.tiers):
            where = f"tiers.{index}"
            if tier.backend not in self.backends:
                raise ValueError(f"{where}.backend: expected one of {', '.join(self.backends)}, found {tier.backend!r}")
            two = tier.style == "two_requests" or tier.confidence.source != "stated"
            if two and tier.states_confidence and self.backends[tier.backend].dialect != "vllm":
                raise ValueError(
                    f"{where}: going on by token ids needs a backend of dialect vllm; {tier.backend} is "
                    f"{self.backends[tier.backend].dialect}"
                )
            actions = {band.action for band in tier.bands or ()} | {tier.invalid}
            if "hook" in actions and self.hook is None:
                raise ValueError(f"{where}: names the action 'hook', but there is no section hook")
            if tier.states_confidence:
                self.rule(index)
        return self

    def rule(self, index: int) -> Rule:
        """What tier ``index`` does with a confidence; by its bands, else by the costs.

        Raises:
            ValueError: it has no bands, and a number that the costs need is missing.
        """
        tier = self.tiers[index]
        if tier.bands is not None:
            return ThresholdRule([_band(band) for band in tier.bands], tier.invalid)
        if self.costs is None or tier.answer_tokens is None:
            raise ValueError(f"tiers.{index}: expected bands, or the section costs and answer_tokens")
        escalate = float("inf")
        if index + 1 < len(self.tiers):
            following = self.tiers[index + 1]
            if following.answer_tokens is None or following.accuracy is None:
                raise ValueError(f"tiers.{index + 1}: the costs need its answer_tokens and accuracy")
            escalate = following.price * following.answer_tokens + (1 - following.accuracy) * self.costs.error
        answer = tier.price * tier.answer_tokens
        return CostRule(answer, self.costs.error, self.costs.refusal, escalate, tier.invalid)


def _band(band: BandConfig) -> Band:
    return Band(band.at_least, band.action, band.samples)


def answer_gate(config: GateConfig) -> AnswerGate:
    """The gate that a section describes."""
    return AnswerGate(config.mean_log_prob, config.cut_off, config.otherwise)


def read_serving_config(path: Path) -> ServingConfig:
    """Read and check the file; paths in it are relative to it.

    Raises:
        ConfigError: every problem, a line each, with file, key and what was found.
    """
    try:
        values = read_yaml(path)
    except (OSError, YamlError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a mapping of keys, found {type(values).__name__}")
    try:
        return _relative_to(ServingConfig.model_validate(values), path.parent)
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            key = ".".join(map(str, problem["loc"]))
            message = problem["msg"].removeprefix("Value error, ")
            if problem["type"] == "extra_forbidden":
                message = f"unknown key{_nearest(key)}"
            found = "" if problem["type"] in ("missing", "value_error") else f", found {problem['input']!r:.80}"
            lines.append(f"{path}: {key}: {message}{found}" if key else f"{path}: {message}{found}")
        raise ConfigError("\n".join(lines)) from error


def _relative_to(config: ServingConfig, directory: Path) -> ServingConfig:
    tiers = [
        tier if tier.calibration is None else tier.model_copy(update={"calibration": str(directory / tier.calibration)})
        for tier in config.tiers
    ]
    log = config.log and config.log.model_copy(update={"directory": str(directory / config.log.directory)})
    return config.model_copy(update={"tiers": tiers, "log": log})


def _nearest(key: str) -> str:
    """A guess at what an unknown key should have been, and the keys that there are."""
    *sections, name = key.split(".")
    model: Any = ServingConfig
    for part in sections:
        if part in getattr(model, "model_fields", {}):
            model = _section_of(model.model_fields[part].annotation)
    known = list(getattr(model, "model_fields", {}))
    close = difflib.get_close_matches(name, known, n=1)
    return (f", did you mean {close[0]!r}?" if close else "") + f"; known: {', '.join(known)}"


def _section_of(annotation: Any) -> Any:
    """The section that an annotation holds, be it optional, in a list or in a mapping."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, UnionType, list, dict):
        return next((found for part in get_args(annotation) if (found := _section_of(part)) is not None), None)
    return None
