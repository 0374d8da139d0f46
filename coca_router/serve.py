"""``coca-router serve``: the routing proxy of a configuration, or one model behind the same API."""

import argparse
import ipaddress
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coca_mindspeed.cli.options import at_least, device_name, template_variables
from coca_mindspeed.errors import UsageError
from coca_mindspeed.utils.packages import ROUTER, require

if TYPE_CHECKING:
    from coca_router.config import ServingConfig


_THINKING_TOKENS = 16384


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("config", nargs="?", type=Path, metavar="CONFIG", help="YAML of tiers (docs/serving.md)")
    option("--model", type=Path, metavar="DIR", help="serve this run or Hugging Face directory itself instead")
    option("--name", help="name of the model for clients (default: the directory's)")
    option("--host", help="address to listen on (default: 127.0.0.1, or by CONFIG)")
    option("--port", type=at_least(0, 65535), help="port (default: 8000 with --model, else by CONFIG)")
    option("--concurrent", type=at_least(1), default=4, help="--model: responses at once (default: 4)")
    longest = f"--model: longest response, in tokens (default: 1024; {_THINKING_TOKENS} with thinking)"
    option("--max-tokens", type=at_least(1), help=longest)
    option("--device", type=device_name, default="auto", help="--model: auto, cpu, cuda, cuda:N, npu or npu:N")
    dtype = "--model: dtype of the computation (default: that of its training, or float32)"
    option("--dtype", choices=("float32", "bfloat16"), help=dtype)
    variables = '--model: variables of its chat template, {"enable_thinking": false} for example'
    option("--chat-template-kwargs", type=template_variables, metavar="JSON", help=variables)
    category = "--model: its instruction follows each question (default: the only one that was trained); request: by "
    option("--category", metavar="NAME", help=f"{category}the header x-coca-category")
    raw = "--model: render messages as they are sent, without the system prompt and instruction of the training"
    option("--raw-prompts", action="store_true", help=raw)
    option("--api-key-env", metavar="NAME", help="--model: variable that holds the key clients must show")
    name = "--model: a name by which clients reach it, where no key is set (addresses and localhost always do)"
    option("--allow-host", action="append", default=[], metavar="NAME", help=name)
    option("--export", type=Path, metavar="DIR", help="write the request log of CONFIG there as JSON Lines, and stop")
    option("--check", action="store_true", help="check CONFIG, its keys and its maps, and stop")


def run(arguments: argparse.Namespace) -> int:
    if (arguments.config is None) == (arguments.model is None):
        raise UsageError("name either a CONFIG of tiers or --model DIR")
    if arguments.export is not None and arguments.model is not None:
        raise UsageError("--export needs a CONFIG with the section log")
    require(*ROUTER, purpose="serve")
    if arguments.model is not None:
        return _serve_model(arguments)
    from coca_router.config import read_serving_config

    config = read_serving_config(arguments.config)
    if arguments.export is None:
        return _serve_proxy(arguments, config)
    from coca_router.request_log import export_log

    if config.log is None:
        raise UsageError("--export needs a CONFIG with the section log")
    requests, labelled = export_log(Path(config.log.directory), arguments.export)
    print(f"{arguments.export}: {requests:,} requests, {labelled:,} of them labelled")
    return 0


def _serve_proxy(arguments: argparse.Namespace, config: "ServingConfig") -> int:
    from coca_router.proxy import Proxy

    listen, limits = config.listen, config.limits
    where = arguments.host or listen.host, listen.port if arguments.port is None else arguments.port
    if listen.api_key_env is None:
        _warn_if_reachable(*where, "listen.api_key_env")
    for name, backend in config.backends.items():
        if address := backend.unusual_address():
            sys.stderr.write(
                f"warning: backends.{name}.url: requests go to {address}; most servers expect a url up to and "
                "including /v1\n"
            )
    text = f"{config.name}: tiers {', '.join(tier.name for tier in config.tiers)}"
    return _serve(arguments, Proxy(config), *where, text, connections=limits.connections, drain_s=limits.drain_s)


def _serve_model(arguments: argparse.Namespace) -> int:
    from coca_mindspeed.cli.trained_prompt import model_directory, trained_prompt_of
    from coca_mindspeed.config.schema import ModelConfig
    from coca_mindspeed.local.load import load_policy
    from coca_mindspeed.local.policy import choose_device
    from coca_router.model_server import ModelServer
    from coca_router.prompts import ServedPrompt

    variable = arguments.api_key_env
    key = None if variable is None else os.environ.get(variable)
    if variable is not None and not key:
        raise UsageError(f"--api-key-env: the environment variable {variable} is not set")
    where = arguments.host or "127.0.0.1", 8000 if arguments.port is None else arguments.port
    if key is None:
        _warn_if_reachable(*where, "--api-key-env")
    path = model_directory(arguments.model)
    trained = trained_prompt_of(path)
    dtype = arguments.dtype or (trained and trained.compute_dtype) or "float32"
    if arguments.raw_prompts:
        trained = None
    if trained is None and arguments.category is not None:
        raise UsageError(f"--category: {arguments.model} names no form of a prompt; leave --category out")
    form = None
    if trained is not None:
        form = ServedPrompt.of_form(trained.form, arguments.category, key="--category")
    device = choose_device(arguments.device, where="--device")
    config = ModelConfig(compute_dtype=dtype, chat_template_kwargs=arguments.chat_template_kwargs or {})
    print(f"loading {path}", file=sys.stderr, flush=True)
    policy = load_policy(path, config, device, where="--model")
    name = arguments.name or arguments.model.resolve().name
    longest = _THINKING_TOKENS if form is not None and form.form.thinking else 1024
    sizes = {"concurrent": arguments.concurrent, "max_tokens": arguments.max_tokens or longest}
    server = ModelServer(policy, name, **sizes, key=key, hosts=[where[0], *arguments.allow_host], form=form)
    return _serve(arguments, server, *where, f"{name}: {arguments.model}")


def _serve(arguments: argparse.Namespace, served: Any, host: str, port: int, text: str, **options: Any) -> int:
    from coca_router.http_server import Server

    if arguments.check:
        print(f"{arguments.config or arguments.model}: can be served")
        return 0
    announcement = f"{text} at http://{host}:{port}/v1"
    Server(served.app(), served.shutdown, host=host, port=port, announcement=announcement, **options).run()
    return 0


def _warn_if_reachable(host: str, port: int, key: str) -> None:
    """Warn if other machines may reach this address; a name may be anybody's."""
    try:
        if host == "localhost" or ipaddress.ip_address(host).is_loopback:
            return
    except ValueError:
        pass
    sys.stderr.write(
        f"warning: everyone who reaches {host}:{port} may ask, since no key is set; name a variable that holds one "
        f"by {key}, or listen on 127.0.0.1\n"
    )
