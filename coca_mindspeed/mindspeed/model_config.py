"""Compare a model's ``config.json``, by which vLLM samples, with the model that Megatron builds from the run's keys.

Both are written in the terms of ``config.json``; a key that it omits has the default of transformers' class.  Neither
torch nor transformers is imported.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from coca_mindspeed.errors import Problem, show_value
from coca_mindspeed.mindspeed.keys import RENAMES, actor_values, underscored
from coca_mindspeed.utils.text_formats import parse_json, read_yaml, value_of

_DATA: dict[str, Any] = read_yaml(Path(__file__).with_name("model_families.yaml"))
#: Model type -> class in vLLM, Megatron's arguments, and the keys that say what it computes with their defaults.
FAMILIES: dict[str, dict[str, Any]] = _DATA["families"]
_SAME, _SCALING, _MEGATRON = _DATA["same"], _DATA["scaling"], _DATA["megatron"]
_LENGTHS, _ALIASES, _NEUTRAL = _DATA["lengths"], _DATA["aliases"], _DATA["neutral"]
_DTYPES = (None, "auto", "float32", "float16", "bfloat16")  # both engines compute in the run's own
_OF_TOOLS = ("_", "unsloth_", "transformers.js")  # beginnings of notes that tools leave


class Comparison(NamedTuple):
    """``problems`` of the directory's ``config.json``, and ``notes`` on keys that are not compared."""

    problems: list[Problem]
    notes: list[str]


def compare_model(directory: str | None, values: Mapping[str, Any], names: Mapping[str, str] = RENAMES) -> Comparison:
    """Compare the ``config.json`` of a model with MindSpeed-RL's sections; empty if there is no such file.

    ``names`` are those that the run's file has for keys of MindSpeed-RL, for messages.
    """
    file = Path(str(directory)) / "config.json"
    if directory is None or not file.is_file():
        return Comparison([], [])
    try:
        found = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return Comparison([Problem("model", "config.json", str(file), f"must be readable: {error}")], [])
    return _compare(found if isinstance(found, dict) else {}, underscored(values), names)


def _compare(contents: dict[str, Any], values: Mapping[str, Any], names: Mapping[str, str]) -> Comparison:
    actor = {key: value for key, value in actor_values(values).items() if value is not None}
    kind = contents.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        expected = f"must be {', '.join(FAMILIES)}, which MindSpeed-RL loads into vLLM"
        return Comparison([_problem("model_type", kind, expected)], [])
    family = FAMILIES[kind]
    config = {**family["defaults"], **contents}
    generate = value_of(values, "generate_config") or {}
    longest = generate.get("max_model_len") or 2048  # MindSpeed-RL's default
    problems = [
        *_family(kind, config, actor, names, custom_code=bool(generate.get("trust_remote_code"))),
        *_shapes(config, actor, names),
        *_rope(contents, config, actor, names),
        *_attention(kind, config, longest),
        *_others(contents),
    ]
    compared = {*family["defaults"], *_NEUTRAL, *_LENGTHS, *_ALIASES, "model_type", "dtype", "torch_dtype"}
    compared |= {"rope_parameters", "sliding_window", "use_sliding_window", "layer_types"}
    unread = sorted(contents.keys() - compared - {*_DATA["harmless"]})
    unread = [key for key in unread if not key.startswith(_OF_TOOLS)]
    notes = [f"config.json: no effect on {family['class']}: {', '.join(unread)}"] if unread else []
    if not any(_windows(kind, config, longest)) and any(_windows(kind, {**config, "max_window_layers": 0}, longest)):
        notes.append(
            "config.json: max_window_layers switches sliding_window off; vLLM 0.9.1 may not heed it: try the run"
        )
    return Comparison(problems, notes)


def _problem(key: str, value: Any, expected: str, fix: str = "") -> Problem:
    shown = f"{expected}, found {value}" if isinstance(value, dict) else expected
    return Problem("model", f"config.json: {key}", value, shown, fix)


def _source(argument: str, names: Mapping[str, str]) -> str:
    """Megatron's argument, and the key that sets it if it has another name."""
    name = names.get(f"model.actor.{argument}")
    return f"{name}, Megatron's {argument}" if name else f"Megatron's {argument}"


def _family(
    kind: str, config: Mapping[str, Any], actor: Mapping[str, Any], names: Mapping[str, str], *, custom_code: bool
) -> Iterator[Problem]:
    """Facts of a model type that have no key: its class, biases of QKV, norms."""
    family = FAMILIES[kind]
    for argument, wanted in {
        **family["arguments"],
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
    }.items():
        if (built := {**_MEGATRON, **actor}.get(argument, False)) != wanted:
            reason = f"needs {show_value(wanted)} of {_source(argument, names)}, found {show_value(built)}"
            yield _problem("model_type", kind, reason)
            break
    if (classes := config.get("architectures")) and classes != [family["class"]]:
        yield _problem("architectures", classes, f"must be ['{family['class']}'], which MindSpeed-RL loads into vLLM")
    if custom_code and config.get("auto_map"):
        key = names.get("generate_config.trust_remote_code", "generate_config.trust_remote_code")
        reason = f"must be absent with {key}=true: its Python code may compute anything"
        yield _problem("auto_map", config["auto_map"], reason)


def _shapes(config: Mapping[str, Any], actor: Mapping[str, Any], names: Mapping[str, str]) -> Iterator[Problem]:
    """Sizes and switches of both sides; arguments that Megatron requires and lacks are left to MindSpeed-RL."""
    arguments = {**_MEGATRON, **actor}
    hidden, heads = arguments.get("hidden_size"), arguments.get("num_attention_heads")
    groups = "num_query_groups" if arguments.get("group_query_attention") else "num_attention_heads"
    built = {key: (arguments.get(argument), _source(argument, names)) for key, argument in _SAME.items()} | {
        "num_key_value_heads": (arguments.get(groups), _source(groups, names)),
        "tie_word_embeddings": (
            not arguments.get("untie_embeddings_and_output_weights"),
            _source("untie_embeddings_and_output_weights", names),
        ),
        "hidden_act": ("silu" if arguments.get("swiglu") else "gelu", _source("swiglu", names)),
        "mlp_bias": (not arguments.get("disable_bias_linear"), _source("disable_bias_linear", names)),
        "attention_bias": (False, "Megatron has a bias of QKV alone"),
    }
    # The plan, the conversion and vLLM's weight loader divide the hidden size by the heads.
    head = hidden // heads if isinstance(hidden, int) and isinstance(heads, int) else None
    built["head_dim"] = head, f"hidden size / heads = {hidden} / {heads}"
    if head and arguments.get("kv_channels", head) != head:
        yield Problem("model", "kv_channels", arguments["kv_channels"], f"must be hidden size / heads = {head}")
    absent = {"mlp_bias", "attention_bias"} - FAMILIES[config["model_type"]][
        "defaults"
    ].keys()  # a type without them has none
    read = {**config, **dict.fromkeys(absent, False)}
    if read["hidden_act"] == "swish":  # another name of silu
        read["hidden_act"] = "silu"
    found = (read.get(key) for key in (*_ALIASES, "num_key_value_heads", "num_attention_heads"))
    read["num_key_value_heads"] = next((value for value in found if value is not None), None)
    if read["head_dim"] is None:
        read["head_dim"] = head  # hidden size and heads are compared
    for key, (value, source) in built.items():
        if value is not None and read[key] != value:
            yield _problem(key, config.get(key), f"must be {show_value(value)}: {source}")


def _rope(
    contents: Mapping[str, Any], config: Mapping[str, Any], actor: Mapping[str, Any], names: Mapping[str, str]
) -> Iterator[Problem]:
    """Scaling of the rotary frequencies; and whether transformers 4, which MindSpeed-RL needs, reads what 5 wrote."""
    scaling, kind, built = _scaling(config["rope_scaling"]), actor.get("rope_scaling_type"), None
    if kind is not None:
        built = {"rope_type": kind} | {key: actor.get(argument) for key, argument in _SCALING.items()}
    ours = names.get("model.actor.rope_scaling_type", "Megatron's rope_scaling_type").removesuffix(".rope_type")
    if (scaling or {}).get("rope_type", "llama3") != "llama3" or kind not in (None, "llama3"):
        reason = "must be null or have rope_type llama3: Megatron is trained with no other scaling"
        yield _problem("rope_scaling", config["rope_scaling"], reason)
    elif scaling != built:
        fix = f"set {ours} to the model's; model=llama31_8b has that of Llama 3.1"
        yield _problem("rope_scaling", config["rope_scaling"], f"must be {built or 'null'}, as {ours}", fix)
    if isinstance(rope := contents.get("rope_parameters"), dict):
        inner = {key: value for key, value in rope.items() if key != "rope_theta"}
        if rope.get("rope_theta", config["rope_theta"]) != config["rope_theta"] or _scaling(inner) != scaling:
            reason = "must agree with rope_theta and rope_scaling beside it: transformers 4 reads these alone"
            fix = "transformers 5 wrote it: write rope_theta and rope_scaling at the top level of config.json too"
            yield _problem("rope_parameters", rope, reason, fix)


def _scaling(rope: Any) -> dict[str, Any] | None:
    """``rope_scaling`` with one spelling of its type; None if nothing is scaled."""
    if not isinstance(rope, Mapping):
        return None if rope is None else {"rope_type": rope}
    values = {key: value for key, value in rope.items() if value is not None}
    kind = values.pop("type", None)
    values.setdefault("rope_type", kind)
    return None if values["rope_type"] in (None, "default") and values.keys() == {"rope_type"} else values


def _windows(kind: str, config: Mapping[str, Any], longest: int) -> Iterator[str]:
    """Keys by which the attention has a window that a sequence of ``longest`` tokens exceeds."""
    window, first, layers = (config.get(key) for key in ("sliding_window", "max_window_layers", "num_hidden_layers"))
    short = window is not None and not (isinstance(window, int) and window >= longest)
    listed = "max_window_layers" in FAMILIES[kind]["defaults"]
    beyond = listed and isinstance(first, int) and isinstance(layers, int) and first >= layers
    if short and config.get("use_sliding_window") is not False and not beyond:
        yield "sliding_window"
    kinds = config.get("layer_types") or []
    full = isinstance(kinds, list) and all(kind == "full_attention" for kind in kinds)
    if not full and (short or window is None):
        yield "layer_types"


def _attention(kind: str, config: Mapping[str, Any], longest: int) -> Iterator[Problem]:
    """The window of the attention and the longest sequence."""
    for key in _windows(kind, config, longest):
        yield _problem(key, config[key], "must be off (use_sliding_window: false): Megatron attends to all tokens")
    for key in _LENGTHS:
        if isinstance(value := config.get(key), int) and value < longest:
            yield _problem(key, value, f"must be at least generate_config.max_model_len={longest} for vLLM")


def _others(contents: Mapping[str, Any]) -> Iterator[Problem]:
    for key, neutral in _NEUTRAL.items():
        if key in contents and contents[key] not in neutral:
            yield _problem(
                key, contents[key], f"must be {show_value(neutral[-1])} or absent: Megatron has nothing like it"
            )
    for key in ("torch_dtype", "dtype"):
        if contents.get(key) not in _DTYPES:
            yield _problem(key, contents[key], "must be float32, float16 or bfloat16")
