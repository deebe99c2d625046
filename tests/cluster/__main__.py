"""`PYTHONPATH=tests python -m cluster VERB`: a real Kubernetes of three workers to test on, and verbs to hurt it."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from urllib.error import URLError

from cluster import binaries, engines, own, use
from cluster.engine import Engine, Status
from cluster.errors import ClusterError
from support.servers import s3_server

NODE_VERBS = {
    "return": "undo whatever was done to a node; a crashed one boots again; waits until it is Ready",
    "freeze": "SIGSTOP to everything on a node",
    "thaw": "SIGCONT to everything on a node",
    "partition": "take a node's link down; everything on it goes on running",
    "heal": "bring a node's link up",
    "stop-kubelet": "kill a node's kubelet; its containers live on",
}


def main() -> int:
    """Exit codes: 0 done or well, 1 not well, 2 could not."""
    options = _parser().parse_args()
    try:
        return _run(options)
    except ClusterError as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 2
    except URLError as error:
        print(f"cluster: the API server refused or did not answer: {error}; see `status`", file=sys.stderr)
        return 2
    except PermissionError as error:
        print(f"cluster: {error}; the cluster is root's, so are its verbs", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    began = time.monotonic()
    if options.verb == "build":
        own.build_programs()
        if options.nightly:
            binaries.kueue()
        return 0
    if options.verb == "run":
        return use.run(options.command, options.nodes)
    engine = engines.choose(options.engine)
    if options.verb == "up":
        engine.up(options.nodes)
        print(f"{options.nodes} nodes are Ready after {time.monotonic() - began:.1f} s")
        _print_facts(engine)
        return 0
    if options.verb == "down":
        engine.down()
        print(f"nothing is left, after {time.monotonic() - began:.1f} s")
        return 0
    if options.verb == "status":
        return _print_status(engine.status())
    if options.verb == "kubeconfig":
        print(engine.facts().kubeconfig)
        return 0
    if options.verb == "env":
        _print_facts(engine)
        return 0
    _hurt(engine, options)
    return 0


def _hurt(engine: Engine, options: argparse.Namespace) -> None:
    verb = options.verb
    if verb == "crash":
        engine.crash(options.node, silently=options.silently)
    elif verb == "kill-container":
        namespace, _, pod = options.pod.rpartition("/")
        engine.kill_container(namespace or "default", pod, options.container)
    elif verb == "kill-daemon":
        engine.kill_daemon(options.daemon)
    elif verb == "start-daemon":
        engine.start_daemon(options.daemon)
    else:
        actions = {
            "return": engine.return_node,
            "freeze": engine.freeze,
            "thaw": engine.thaw,
            "partition": engine.partition,
            "heal": engine.heal,
            "stop-kubelet": engine.stop_kubelet,
        }
        actions[verb](options.node)


def _print_facts(engine: Engine) -> None:
    """For `eval`: kubectl, helm, aws and boto3 find everything."""
    facts = engine.facts()
    print(f"export KUBECONFIG={shlex.quote(str(facts.kubeconfig))}")
    print(f"export PATH={':'.join(shlex.quote(str(folder)) for folder in facts.programs)}:$PATH")
    print(f"export AWS_ENDPOINT_URL={facts.s3_endpoint}")
    print(f"export AWS_ACCESS_KEY_ID={s3_server.ACCESS_KEY}")
    print(f"export AWS_SECRET_ACCESS_KEY={s3_server.SECRET_KEY}")
    print("export AWS_DEFAULT_REGION=us-east-1")
    print(f"export SUREFOOT_TEST_BUCKET={s3_server.BUCKET}")


def _print_status(status: Status) -> int:
    print(f"engine {status.engine}; the API server {'answers' if status.api_answers else 'does not answer'}")
    for name, runs in status.daemons.items():
        print(f"  {name:26}{'runs' if runs else 'does not run'}")
    for node in status.nodes:
        said = ["Ready" if node.ready else "not Ready"]
        said += ["down"] if not node.is_running else []
        said += ["frozen"] if node.is_frozen else []
        said += ["cut off"] if not node.is_joined else []
        said += ["no kubelet"] if node.is_running and not node.has_kubelet else []
        print(f"  {node.name:26}{', '.join(said)}")
    return 0 if status.is_well else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cluster", description=__doc__)
    parser.add_argument("--engine", choices=engines.NAMES, help="default: kind where docker answers, else namespaces")
    verbs = parser.add_subparsers(dest="verb", required=True)
    build = verbs.add_parser(
        "build", help="build the programs into the user's cache and do no more; needs Go, not root"
    )
    build.add_argument("--nightly", action="store_true", help="also what only the nightly run's tests need")
    up = verbs.add_parser("up", help="make the cluster, or repair it; waits until every node is Ready")
    up.add_argument("--nodes", type=int, default=3)
    command = verbs.add_parser(
        "run", help="a command that has the cluster for itself; one that is brought up for it is taken down"
    )
    command.add_argument("--nodes", type=int, default=3, help="0: whatever stands, the command sees to it")
    command.add_argument("command", nargs="+", help="after --")
    verbs.add_parser("down", help="leave nothing")
    verbs.add_parser("status", help="what runs, what is Ready")
    verbs.add_parser("kubeconfig", help="print its path")
    verbs.add_parser("env", help='shell lines: eval "$(python -m cluster env)"')
    crash = verbs.add_parser("crash", help="SIGKILL to everything on a node at once")
    crash.add_argument("node")
    crash.add_argument("--silently", action="store_true", help="cut the link first: no peer hears connections close")
    for verb, text in NODE_VERBS.items():
        verbs.add_parser(verb, help=text).add_argument("node")
    container = verbs.add_parser("kill-container", help="SIGKILL to the first process of a pod's container")
    container.add_argument("pod", help="POD or NAMESPACE/POD")
    container.add_argument("--container", help="default: the pod's first")
    for verb in ("kill-daemon", "start-daemon"):
        verbs.add_parser(verb, help="etcd, kube-apiserver, coredns, s3…").add_argument("daemon")
    return parser


if __name__ == "__main__":
    sys.exit(main())
