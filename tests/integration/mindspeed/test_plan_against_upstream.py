"""No layout that ``coca-mindspeed check`` lets pass is refused by MindSpeed-RL's own config classes and validation.

They are loaded from the real sources with their imports of Ray, Megatron and the NPU left out: they are arithmetic.
"""

import importlib.util
import itertools
import os
import random
import sys
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from omegaconf import OmegaConf

from coca_mindspeed.config.compose import compose_run, ready_made_runs
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.mindspeed.cluster_run import ClusterRun
from coca_mindspeed.mindspeed.keys import translate
from coca_mindspeed.mindspeed.layout import layout_problems
from coca_mindspeed.mindspeed.plan import make_plan
from coca_mindspeed.mindspeed.start.run_file import StageFiles, mindspeed_values
from coca_mindspeed.mindspeed.upstream_keys import shipped_keys
from tests.support.mindspeed_keys import PACKAGES, homes_of, megatrons, read_upstream_keys, with_readers
from tests.upstream_settings import NOT_SET, ours, rows, theirs

HOME = os.environ.get("MINDSPEED_RL_HOME")
pytestmark = pytest.mark.skipif(HOME is None, reason="MINDSPEED_RL_HOME is not set")

ON_ASCEND = [name for name in ready_made_runs() if "_910" in name]


class Upstream:
    """MindSpeed-RL's ``parse_training_config``, as far as it concerns numbers."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nodes = 1
        utilities, more = ModuleType("mindspeed_rl.utils"), ModuleType("mindspeed_rl.utils.utils")
        utilities.Loggers = lambda _name: None  # type: ignore[attr-defined]
        more.get_node_nums = lambda: self.nodes  # type: ignore[attr-defined]
        package, configs = ModuleType("mindspeed_rl"), ModuleType("mindspeed_rl.config_cls")
        package.__path__, configs.__path__ = [], []
        for module in (package, configs, utilities, more):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        self.modules = {}
        for name in (
            *("base_config", "megatron_config", "rl_config"),
            *("generate_config", "validate_config", "mindstudio_config"),
        ):
            full = f"mindspeed_rl.config_cls.{name}"
            path = root / "mindspeed_rl" / "config_cls" / f"{name}.py"
            spec = importlib.util.spec_from_file_location(full, path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            monkeypatch.setitem(sys.modules, full, module)
            spec.loader.exec_module(module)
            self.modules[name] = module

    def validate(self, values: dict[str, Any], nodes: int) -> None:
        self.nodes = nodes
        config = OmegaConf.create(deepcopy(values))
        actor = self.modules["megatron_config"].MegatronConfig(
            {**config.megatron_training, **config.actor_config}, config.model
        )
        rl = self.modules["rl_config"].RLConfig(config.rl_config)
        generate = self.modules["generate_config"].GenerateConfig(config.generate_config)
        self.modules["validate_config"].validate_rl_args(actor, actor, actor, rl, generate)


@pytest.fixture
def upstream(monkeypatch: pytest.MonkeyPatch) -> Upstream:
    return Upstream(Path(str(HOME)), monkeypatch)


def _values(run: RunConfig) -> dict[str, Any]:
    return mindspeed_values(ClusterRun(run), make_plan(run).iterations, StageFiles(Path("runs/x")))


@pytest.mark.parametrize("name", ON_ASCEND)
@pytest.mark.parametrize("override", ["hardware.nodes=2", "trainer.minibatches=4"])
def test_ready_made_runs_pass_upstream(upstream: Upstream, name: str, override: str) -> None:
    run = compose_run(name, [override]).run
    upstream.validate(_values(run), run.hardware.nodes)


def test_upstream_refuses_these_values_too(upstream: Upstream) -> None:
    for section, key, value in (
        ("generate_config", "infer_pipeline_parallel_size", 2),
        ("generate_config", "max_model_len", 4096),
        ("generate_config", "dtype", "float16"),
        ("megatron_training", "reset_attention_mask", False),
        ("rl_config", "verifier_weight", [1.0, 1.0]),
        ("rl_config", "adv_dispatch_size", 48),
        ("rl_config", "actor_rollout_dispatch_size", 24),
        ("rl_config", "no_such_key", 1),
    ):
        values = _values(compose_run("qwen25_7b_910b").run)
        values[section][key] = value
        with pytest.raises(ValueError, match=r".+"):
            upstream.validate(values, 1)


def test_what_passes_here_passes_there(upstream: Upstream) -> None:
    base = compose_run("qwen25_7b_910b").run
    template, draw = _values(base), random.Random(0)
    choices = {
        ("actor_config", "tensor_model_parallel_size"): [1, 2, 3, 4, 8],
        ("actor_config", "pipeline_model_parallel_size"): [1, 2, 4],
        ("actor_config", "micro_batch_size"): [1, 2, 3, 16, 256],
        ("generate_config", "infer_tensor_parallel_size"): [1, 2, 4, 8],
    }
    passed = refused = 0
    for nodes in itertools.islice(itertools.cycle([1, 2]), 2000):
        values = deepcopy(template)
        values["rl_config"]["actor_resource"]["num_npus"] = 8 * nodes
        for (section, key), options in choices.items():
            values[section][key] = draw.choice(options)
        sizes = {"prompts": draw.choice([8, 12, 64, 100, 128]), "group_size": draw.choice([2, 8, 16])}
        sections = {"hardware": {"nodes": nodes}, "rollout": sizes, "trainer": {"minibatches": draw.choice([1, 2, 16])}}
        changed = {name: getattr(base, name).model_copy(update=changes) for name, changes in sections.items()}
        run = base.model_copy(update={"mindspeed_rl": values, **changed})
        if layout_problems(ClusterRun(run).resolved):
            refused += 1
            continue
        passed += 1
        upstream.validate(translate(run), nodes)
    assert passed > 20
    assert refused > 20


MASTER = "MINDSPEED_RL_MASTER_HOME"
CHECKOUTS = [path for path in (HOME, os.environ.get(MASTER)) if path]
CLASSES = {
    "megatron_training": ("megatron_config", "MegatronConfig", {"training_config": {}, "model_config": {}}),
    "rl_config": ("rl_config", "RLConfig", {"config_dict": {}}),
    "generate_config": ("generate_config", "GenerateConfig", {"config_dict": {}}),
    "msprobe_config": ("mindstudio_config", "MsprobeConfig", {"config_dict": {}}),
    "profiler_config.integrated": ("mindstudio_config", "ProfilerConfig", {"config_dict": {}}),
}


@pytest.mark.parametrize("home", CHECKOUTS)
def test_the_keys_that_we_read_are_those_that_upstream_takes(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = Upstream(Path(home), monkeypatch).modules
    keys = read_upstream_keys(Path(home))
    for section, (module, name, arguments) in CLASSES.items():
        attributes = set(vars(getattr(modules[module], name)(**arguments)))
        assert set(keys.sections[section]) - {"model"} == attributes, section
    generate = modules["generate_config"].GenerateConfig({})
    assert set(keys.sections["generate_config.sampling_config"]) == set(generate.sampling_config)
    assert set(keys.sections["rl_config.actor_resource"]) == {"num_npus"}


@pytest.mark.parametrize("home", CHECKOUTS)
@pytest.mark.parametrize("name", ON_ASCEND)
def test_upstream_knows_every_key_of_ours(home: str, name: str) -> None:
    run = compose_run(name, ["logging.wandb=coca", "mindspeed_rl.rl_config.init_kl_coef=0.1"]).run
    assert read_upstream_keys(Path(home)).problems(_values(run)) == []


@pytest.mark.parametrize("home", CHECKOUTS)
def test_the_page_lists_every_key_in_which_we_differ_from_upstreams_yaml(home: str) -> None:
    own, upstream = ours(), theirs(Path(home))
    differing = {
        key: (upstream.get(key, NOT_SET), own.get(key, NOT_SET))
        for key in own.keys() | upstream.keys()
        if own.get(key) != upstream.get(key)
    }
    assert rows() == differing


@pytest.mark.parametrize(("release", "variable"), [("2.3.0", "MINDSPEED_RL_HOME"), ("master", MASTER)])
def test_the_shipped_readers_are_those_of_the_sources(release: str, variable: str) -> None:
    """``python -m tests.support.mindspeed_keys`` writes them anew."""
    if any(name not in os.environ for name in (variable, *PACKAGES.values())):
        pytest.skip(f"needs {variable} and {', '.join(PACKAGES.values())}")
    root = Path(os.environ[variable])
    read = with_readers(read_upstream_keys(root), root, *megatrons(homes_of(os.environ))).sections
    shipped = shipped_keys(release).sections
    assert {name: keys for name, keys in read.items() if shipped[name] != keys} == {}
