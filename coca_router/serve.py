"""``coca-router serve``: the routing proxy of a configuration, or one model behind the same API."""

import argparse
import ipaddress
import os
import sys
from pathlib import Path
from typing import Any

from coca_mindspeed.cli.options import at_least, device_name, template_variables
from coca_mindspeed.errors import UsageError
from coca_mindspeed.utils.packages import ROUTER, require


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", type=Path, metavar="CONFIG", help="YAML of tiers (docs/serving.md)")
    parser.add_argument("--model", type=Path, metavar="DIR", help="serve this Hugging Face directory itself instead")
    parser.add_argument("--name", help="of the model, to its clients (default: the directory's)")
    parser.add_argument("--host", help="default: 127.0.0.1, or as CONFIG says")
    parser.add_argument("--port", type=at_least(0, 65535), help="default: 8000 with --model, else as CONFIG says")
    parser.add_argument("--concurrent", type=at_least(1), default=4, help="--model: responses at once (default: 4)")
    parser.add_argument("--max-tokens", type=at_least(1), default=1024, help="--model: of a response (default: 1024)")
    parser.add_argument(
        "--device", type=device_name, default="auto", help="--model: auto, cpu, cuda, cuda:N, npu or npu:N"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="--model: compute")
    parser.add_argument(
        "--chat-template-kwargs",
        type=template_variables,
        metavar="JSON",
        help='--model: variables of its chat template, {"enable_thinking": false} for example',
    )
    parser.add_argument("--threads", type=at_least(1), help="--model: CPU threads")
    parser.add_argument("--api-key-env", metavar="NAME", help="--model: variable that holds the key clients must show")
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="--model: a name by which clients reach it, where no key is set (addresses and localhost always do)",
    )
    parser.add_argument(
        "--export", type=Path, metavar="DIR", help="write the request log of CONFIG there as JSON Lines, and stop"
    )
    parser.add_argument("--check", action="store_true", help="check CONFIG, its keys and its maps, and stop")


def run(arguments: argparse.Namespace) -> int:
    if (arguments.config is None) == (arguments.model is None):
        raise UsageError("name either a CONFIG of tiers or --model DIR")
    if arguments.export is not None:
        return _export(arguments)
    require(*ROUTER, purpose="serve")
    from coca_router.http_server import Server

    app, shutdown, listen, guarded = _model(arguments) if arguments.model is not None else _proxy(arguments)
    host, port = listen["host"], listen["port"]
    if not guarded and not _only_this_machine(host):
        key = "--api-key-env" if arguments.model is not None else "listen.api_key_env"
        sys.stderr.write(
            f"warning: everyone who reaches {host}:{port} may ask, since no key is set; name a variable that holds one "
            f"by {key}, or listen on 127.0.0.1\n"
        )
    if arguments.check:
        print(f"{arguments.config or arguments.model}: can be served")
        return 0
    Server(app, shutdown, **listen).run()
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from coca_router.config import read_serving_config
    from coca_router.request_log import export_log

    config = None if arguments.config is None else read_serving_config(arguments.config)
    if config is None or config.log is None:
        raise UsageError("--export needs a CONFIG with the section log")
    requests, labelled = export_log(Path(config.log.directory), arguments.export)
    print(f"{arguments.export}: {requests:,} requests, {labelled:,} of them labelled")
    return 0


def _only_this_machine(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name; it may be anybody's
        return False


def _proxy(arguments: argparse.Namespace) -> tuple[Any, Any, dict[str, Any], bool]:
    """The application, its shutdown, options of the server, and whether clients must show a key."""
    from coca_router.config import read_serving_config
    from coca_router.proxy import Proxy

    config = read_serving_config(arguments.config)
    host = arguments.host or config.listen.host
    port = config.listen.port if arguments.port is None else arguments.port
    proxy = Proxy(config)
    tiers = ", ".join(tier.name for tier in config.tiers)
    options = {"connections": config.limits.connections, "drain_s": config.limits.drain_s, "host": host, "port": port}
    options["announcement"] = f"{config.name}: tiers {tiers} at http://{host}:{port}/v1"
    return proxy.app(), proxy.shutdown, options, config.listen.api_key_env is not None


def _model(arguments: argparse.Namespace) -> tuple[Any, Any, dict[str, Any], bool]:
    import torch

    from coca_mindspeed.config.schema import ModelConfig
    from coca_mindspeed.local.policy import choose_device, load_policy
    from coca_router.model_server import ModelServer

    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    key = None
    if arguments.api_key_env is not None:
        key = os.environ.get(arguments.api_key_env)
        if not key:
            raise UsageError(f"--api-key-env: the environment variable {arguments.api_key_env} is not set")
    device = choose_device(arguments.device, where="--device")
    config = ModelConfig(compute_dtype=arguments.dtype, chat_template_kwargs=arguments.chat_template_kwargs or {})
    policy = load_policy(arguments.model, config, device, where="--model")
    name = arguments.name or arguments.model.resolve().name
    host, port = arguments.host or "127.0.0.1", 8000 if arguments.port is None else arguments.port
    sizes = {"concurrent": arguments.concurrent, "max_tokens": arguments.max_tokens}
    server = ModelServer(policy, name, **sizes, key=key, hosts=[host, *arguments.allow_host])
    announcement = f"{name}: {arguments.model} at http://{host}:{port}/v1"
    return server.app(), server.shutdown, {"host": host, "port": port, "announcement": announcement}, key is not None
