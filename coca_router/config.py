"""The configuration of ``coca-router serve``: backends, tiers, thresholds, caps and limits."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, Field, ValidationError, ValidationInfo, field_validator, model_validator
from yarl import URL

from coca_mindspeed.algorithm.methods import METHODS
from coca_mindspeed.algorithm.parsing import SYSTEM_PROMPTS, thinking_prompt
from coca_mindspeed.cli.trained_prompt import require_trained_prompt
from coca_mindspeed.config.prompt_form import prompt_file, read_prompt_file
from coca_mindspeed.config.schema import Section
from coca_mindspeed.errors import UNKNOWN_KEY, ConfigError, did_you_mean, validation_problems
from coca_mindspeed.evaluation.predictions import Prediction
from coca_mindspeed.utils.console import print_note
from coca_mindspeed.utils.text_formats import YamlError, read_yaml
from coca_router.calibration import Identity, read_calibration
from coca_router.decision import Action, Band, ThresholdRule, answer_from
from coca_router.openai_api import NEUTRAL_SAMPLING
from coca_router.prompts import BY_REQUEST, ServedPrompt


def _beside_file(path: str, info: ValidationInfo) -> str:
    return path if info.context is None else str(info.context / path)


# As browsers send it: without a path, and without a slash at the end.
Origin = Annotated[str, Field(pattern=r"^[a-z][a-z0-9+.-]*://[^/*\s]+$")]
RelativePath = Annotated[str, AfterValidator(_beside_file)]  # relative to the configuration file


class ListenConfig(Section):
    """Where the proxy listens, and who may ask."""

    host: str = Field("127.0.0.1", description="0.0.0.0 for every interface; set api_key_env then")
    port: int = Field(8080, ge=0, le=65535, description="0: any free one")
    api_key_env: str | None = Field(None, description="environment variable with the key that clients show")
    admin_key_env: str | None = Field(None, description="with the key for labels; null: api_key_env")
    hosts: list[str] = Field([], description="names in Host besides IP addresses and localhost, where no key is set")
    origins: list[Origin] = Field([], description="web pages (scheme://host:port) whose scripts may ask")
    page: bool = Field(True, description="answer / with a page that asks and shows confidence, tier and answer")


#: The value by which the field ``reasoning_effort`` of ``request`` is the client's.
BY_CLIENT = "client"
# Fields that the router writes itself, or that a client or a certificate decides on.
_WRITTEN = (
    *("model", "messages", "stream", "stream_options", "max_tokens", "max_completion_tokens", "return_token_ids"),
    *("temperature", "seed", "n", "stop", "tools", "tool_choice", "response_format", "logprobs", "top_logprobs"),
    *NEUTRAL_SAMPLING,
)


class BackendConfig(Section):
    """An OpenAI-compatible server."""

    url: str = Field(pattern=r"^https?://", description="up to and including /v1")
    model: str = Field(min_length=1, description="its name there")
    api_key_env: str | None = Field(None, description="environment variable that holds its key")
    token_limit: Literal["max_tokens", "max_completion_tokens"] = Field("max_tokens", description="its name there")
    dialect: Literal["openai", "vllm"] = Field("openai", description="vllm (also serve --model): names token ids")
    #: Fixed fields of each request, such as chat_template_kwargs or thinking_token_budget; reasoning_effort: client
    #: passes the client's.
    request: dict[str, Any] = Field(default_factory=dict)
    first_token_s: float = Field(60.0, gt=0, description="longest wait for the first token, the connection included")
    between_tokens_s: float = Field(30.0, gt=0, description="longest wait between two tokens")

    @field_validator("request")
    @classmethod
    def _fixed_fields(cls, request: dict[str, Any]) -> dict[str, Any]:
        if written := [name for name in request if name in _WRITTEN]:
            raise ValueError(f"expected fields that the router does not write itself, found {', '.join(written)}")
        if clients := [name for name, value in request.items() if value == BY_CLIENT and name != "reasoning_effort"]:
            raise ValueError(f"only reasoning_effort may be {BY_CLIENT!r}, found {', '.join(clients)}")
        return request

    def unusual_address(self) -> str | None:
        """Where its chats are sent, without key, if ``url`` seems to lack its path; else None.

        vLLM serves /v1 only, others below any path (/api/paas/v4, /openai/deployments/NAME).
        """
        url = URL(self.url)
        path = url.path.rstrip("/")
        if path and (self.dialect != "vllm" or path.endswith("/v1")):
            return None
        return str(url.with_path(f"{path}/chat/completions").with_user(None))


class BandConfig(Section):
    """Confidences from ``at_least`` up to the band above."""

    at_least: float = Field(ge=0, le=1, description="lowest confidence of the band")
    action: Action = Field(description="answer, refuse or escalate")


class ConfidenceConfig(Section):
    """The number that decides."""

    #: Of one sample, the mean of several, or exp(mean log-prob of the answer's tokens).
    source: Literal["stated", "mean", "answer_logprob"] = "stated"
    samples: int = Field(1, ge=1, le=64, description="of the mean, of about ten tokens each")

    @model_validator(mode="after")
    def _several_for_a_mean(self) -> "ConfidenceConfig":
        if (self.source == "mean") != (self.samples > 1):
            raise ValueError("expected source: mean with samples of 2 or more, or neither")
        return self


class TierConfig(Section):
    """One tier; the first is the cheapest."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$", description="in headers and logs")
    backend: str = Field(description="a name of the section backends")
    states_confidence: bool = Field(True, description="false: a plain model, whose answers are given as they are")
    #: A run, an exported model or its coca_prompt.json: system prompt and instructions that it was trained with.
    form: RelativePath | None = None
    #: Whose instruction follows the question; request: the header x-coca-category names it; null: the form's only one.
    category: str | None = Field(None, min_length=1)
    #: Before the client's own; null: the form's, else the paper's, or none for a plain model.
    system_prompt: str | None = None
    #: Whether the confidence begins a thought; null: the form says so.
    thinking: bool | None = None
    bands: list[BandConfig] | None = Field(None, description="thresholds; null: the certificate's")
    #: Without a valid confidence, and below a certified threshold; null: escalate, or refuse if last.
    invalid: Action | None = None
    confidence: ConfidenceConfig = ConfidenceConfig()
    temperature: float | None = Field(None, ge=0, le=2, description="null: the client's, or the calibration's")
    calibration: RelativePath | None = Field(None, description="file of `coca-router calibrate`; pins the sampling")
    certificate: RelativePath | None = Field(None, description="of `calibrate --risk`; pins threshold and sampling")
    passthrough: bool = Field(False, description="the first such tier gets requests with tools or a response format")
    max_confidence_tokens: int = Field(32, ge=4, description="allowance for the confidence beyond max_tokens")
    max_thought_tokens: int = Field(32768, ge=1, description="with thinking, allowance for the thought likewise")

    @model_validator(mode="after")
    def _consistent(self) -> "TierConfig":
        if self.calibration is not None and self.certificate is not None:
            raise ValueError("certificate: its threshold is of uncalibrated confidences; use it without calibration")
        if self.form is None and self.category is not None:
            raise ValueError("category: expected form, which has the category's instruction")
        if self.form is not None and self.system_prompt is not None:
            raise ValueError("system_prompt: the form has one; name a system prompt or a form")
        if self.form is not None and self.thinking is not None:
            raise ValueError("thinking: the form says it; leave the key out")
        if self.thinking and not self.states_confidence:
            raise ValueError("thinking: states_confidence: false passes thoughts on as they are; leave the key out")
        source = self.confidence.source
        if (self.calibration or self.certificate) and source == "mean":
            raise ValueError("confidence.source: a calibration or certificate holds for 'stated' or 'answer_logprob'")
        if not self.decides and (self.bands or self.certificate or self.calibration or source == "mean"):
            raise ValueError("states_confidence: false: expected no bands, certificate, calibration or mean")
        if self.decides and (self.bands is None) == (self.certificate is None):
            raise ValueError("expected either bands or a certificate")
        if self.certificate is not None and self.invalid == "answer":
            raise ValueError("invalid: below a certified threshold expected refuse or escalate, found 'answer'")
        if self.bands is not None:
            self.rule("escalate")
        return self

    def rule(self, invalid: Action) -> ThresholdRule:
        return ThresholdRule([Band(band.at_least, band.action) for band in self.bands or ()], invalid)

    def passing(self) -> "TierConfig":
        """The same tier as a plain model."""
        return TierConfig(name=self.name, backend=self.backend, temperature=self.temperature, states_confidence=False)

    @property
    def decides(self) -> bool:
        """Whether a confidence decides on its answers."""
        return self.states_confidence or self.confidence.source == "answer_logprob"

    def served_prompt(self) -> ServedPrompt:
        """The form of the prompts that are sent; ConfigError if ``form`` cannot be read, or lacks the category."""
        if self.form is None:
            default = SYSTEM_PROMPTS["first"] if self.states_confidence else None
            default = thinking_prompt(SYSTEM_PROMPTS["first"]) if self.thinking else default
            system_prompt = default if self.system_prompt is None else self.system_prompt
            return ServedPrompt.without_instruction(system_prompt, thinking=bool(self.thinking))
        where = f"tiers: {self.name}"
        trained = require_trained_prompt(Path(self.form), f"{where}.form")
        if self.states_confidence and trained.method and METHODS[trained.method].confidence_position == "last":
            raise ConfigError(f"{where}.form: the model states its confidence last, by which a proxy cannot route")
        return ServedPrompt.of_form(trained.form, self.category, key=f"{where}.category")


class CapsConfig(Section):
    """The most that one request may spend."""

    escalations: int = Field(8, ge=0, description="further tiers")
    tokens: int | None = Field(None, ge=1, description="generated over all tiers; null: no cap")
    exhausted: Literal["answer", "refuse"] = Field("answer", description="in place of an escalation beyond the caps")


class LogConfig(Section):
    """The request log, an SQLite file."""

    directory: RelativePath = Field(description="of requests.sqlite; created if it is missing")
    texts: bool = Field(False, description="also questions and answers")
    max_days: float = Field(90.0, gt=0, description="older records are deleted")


class LimitsConfig(Section):
    """The most that clients may ask of the proxy."""

    connections: int = Field(1024, ge=1, description="open at once; further ones get 503")
    concurrent: int = Field(256, ge=1, description="requests at once; further ones get 429")
    request_bytes: int = Field(4_000_000, ge=1, description="a larger request gets 413")
    body_s: float = Field(30.0, gt=0, description="longest wait for a request's body")
    deadline_s: float = Field(1800.0, gt=0, description="of a whole request")
    drain_s: float = Field(30.0, ge=0, description="for running requests when the proxy is told to stop")


class ServingConfig(Section):
    """The whole file."""

    name: str = Field("coca", pattern=r"^[^@]+$", description="of the model; NAME@0.2 answers from confidence 0.2 on")
    listen: ListenConfig = ListenConfig()
    backends: dict[str, BackendConfig] = Field(min_length=1, description="by name")
    tiers: list[TierConfig] = Field(min_length=1, description="from the cheapest to the most expensive")
    caps: CapsConfig = CapsConfig()
    on_error: Literal["escalate", "fail"] = Field("escalate", description="when a tier fails and no text was sent")
    refusal: str = Field("I am not sure enough to answer this.", min_length=1, description="the text of a refusal")
    log: LogConfig | None = None
    limits: LimitsConfig = LimitsConfig()

    @model_validator(mode="after")
    def _names_exist(self) -> "ServingConfig":
        names = [tier.name for tier in self.tiers]
        if len(set(names)) < len(names):
            raise ValueError(f"tiers: names should differ, found {', '.join(names)}")
        for index, tier in enumerate(self.tiers):
            where = f"tiers.{index}"
            if tier.backend not in self.backends:
                raise ValueError(f"{where}.backend: expected one of {', '.join(self.backends)}, found {tier.backend!r}")
        actions = {f"bands.{n}.action": band.action for n, band in enumerate(tier.bands or ())}
        for key, action in {**actions, "invalid": tier.invalid}.items():
            if action == "escalate":
                raise ValueError(f"{where}.{key}: no tier follows this one; expected answer or refuse")
        return self


@dataclass(frozen=True)
class TierPolicy:
    """A tier's threshold rule (None: no confidence decides), with the content of the file that it names."""

    rule: ThresholdRule | None
    recalibrate: Callable[[float], float] = float
    pinned: Identity | None = None  # model, prompt and sampling of the calibration or certificate
    risk: float | None = None  # certified error of its answers
    prompt: ServedPrompt = field(default_factory=lambda: ServedPrompt.without_instruction(None))


def tier_policies(config: ServingConfig) -> list[TierPolicy]:
    """Read the tiers' forms of prompts, calibrations and certificates.

    ConfigError if a file cannot be read, belongs to another model, form or temperature, or certifies nothing.
    """
    return [_policy(tier, config.backends[tier.backend], tier is config.tiers[-1]) for tier in config.tiers]


def _policy(tier: TierConfig, backend: BackendConfig, last: bool) -> TierPolicy:
    invalid, prompt = tier.invalid or ("refuse" if last else "escalate"), tier.served_prompt()
    if not tier.decides:
        return TierPolicy(None, prompt=prompt)
    if (file := tier.certificate or tier.calibration) is None:
        return TierPolicy(tier.rule(invalid), prompt=prompt)
    content = read_calibration(Path(file))
    where = f"{file}: tiers: {tier.name}"
    if BY_CLIENT in backend.request.values():
        raise ConfigError(
            f"{where}: expected fixed fields of the backend's request, found reasoning_effort: {BY_CLIENT}"
        )
    asked: dict[str, Any] = {"source": tier.confidence.source, "request": backend.request}
    content.identity.require(backend.model, prompt, tier.temperature, where=where, **asked)
    if content.identity.forms == "unknown":
        print_note(f"warning: {where}: form unknown; calibrate anew by predictions that name their form")
    if tier.certificate is None:
        if content.curve is None:
            raise ConfigError(f"{file}: holds a certificate alone; use it as certificate")
        return TierPolicy(tier.rule(invalid), content.recalibrate, content.identity, prompt=prompt)
    if (certificate := content.certificate) is None:
        raise ConfigError(f"{file}: holds no certificate; write one by `calibrate --risk`")
    if certificate.threshold is None:
        raise ConfigError(f"{file}: {certificate.sentence()}")
    rule = answer_from(certificate.threshold, invalid, strict=True)
    return TierPolicy(rule, pinned=content.identity, risk=certificate.risk, prompt=prompt)


def read_serving_config(path: Path) -> ServingConfig:
    """Read and check the file; paths in it are relative to it.

    ConfigError with every problem, a line each, with file, key and value.
    """
    try:
        values = read_yaml(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except YamlError as error:
        raise ConfigError(f"{path}: is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a mapping of keys, found {type(values).__name__}")
    try:
        return ServingConfig.model_validate(values, context=path.parent)
    except ValidationError as error:
        sections = [section for section in Section.__subclasses__() if section.__module__ == __name__]
        known = {key for section in sections for key in section.model_fields}
        problems = []
        for problem in validation_problems(error):
            if problem.code == UNKNOWN_KEY:
                name = problem.key.rpartition(".")[2]
                # A known key may stand in the wrong section, so the key itself is no suggestion.
                problem = problem._replace(expected=f"unknown key{did_you_mean(name, sorted(known - {name}))}")
            problems.append(problem)
        raise ConfigError("\n".join(f"{path}: {problem}" for problem in problems), problems) from error


def bands_from(threshold: float, below: Action = "refuse") -> dict[str, Any]:
    """Keys of a tier that answers from ``threshold`` on; ``below`` applies below it and without a confidence."""
    answer = [{"at_least": threshold, "action": "answer"}] if threshold > 0 else []
    return {"bands": [*answer, {"at_least": 0.0, "action": below if answer else "answer"}], "invalid": below}


def source_keys(plain: bool) -> dict[str, Any]:
    """Keys of a tier that decides by the answer's log-prob; ``plain``: of a model that states no confidence."""
    return {"confidence": {"source": "answer_logprob"}, **({"states_confidence": False} if plain else {})}


def form_keys(file: Path, predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Keys of a tier with the form of a run's ``predictions``, of ``file``; empty if no form is beside the file."""
    beside = prompt_file(file.resolve() if file.is_dir() else file.resolve().parent)
    if beside is None:
        return {}
    digests, named = read_prompt_file(beside).form.digests(), {p.form for p in predictions}
    if named == set(digests.values()):
        several = {} if len(digests) == 1 else {"category": BY_REQUEST}
        return {"form": str(beside), **several}
    only = [category for category, digest in digests.items() if named == {digest}]
    return {"form": str(beside), "category": only[0]} if only else {}


def tiers_yaml(tiers: Mapping[str, Mapping[str, Any]], **sections: Any) -> str:
    """YAML of ``sections`` and of tiers, name -> keys, whose backends have the same names."""
    names = {name: re.sub(r"[^A-Za-z0-9._-]", "-", name) for name in tiers}
    rows = [{"name": names[name], "backend": names[name], **keys} for name, keys in tiers.items()]
    return yaml.safe_dump({**sections, "tiers": rows}, sort_keys=False)
