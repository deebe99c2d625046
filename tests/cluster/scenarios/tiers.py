"""What lies in the tiers, as an administrator sees it, and what one job's account may do there."""

from __future__ import annotations

import json

import boto3

from cluster.scenarios.installed import Installed
from cluster.scenarios.job import Job
from cluster.scenarios.shapes import BUCKET_PREFIX
from support.servers import s3_server

_COUNT = 'redis-cli --no-auth-warning -a "$(cat /var/run/secrets/surefoot-memory/password)" --scan --pattern "sf:{uid}:*" | wc -l'
_TRY = """
import json, os, sys, redis
uid, hosts = sys.argv[1], sys.argv[2:]
said = {}
for host in hosts:
    client = redis.Redis(host, username=os.environ["SUREFOOT_MEMORY_USER"], password=os.environ["SUREFOOT_MEMORY_PASSWORD"])
    for what, call in (
        ("read", lambda: client.hgetall(f"sf:{uid}:index")),
        ("write", lambda: client.set(f"sf:{uid}:tried", b"x")),
        ("delete", lambda: client.unlink(f"sf:{uid}:tried")),
    ):
        try:
            call()
            said[f"{what} on {host}"] = "done"
        except redis.RedisError as error:
            said[f"{what} on {host}"] = str(error)
print(json.dumps(said))
"""


def keys(installed: Installed, uid: str) -> dict[str, int]:
    """Node -> how many keys of that job its holder has."""
    found = {}
    for pod in installed.pods("memory-tier"):
        name = pod["metadata"]["name"]
        said = installed.kubectl("exec", name, "--container=redis", "--", "sh", "-c", _COUNT.format(uid=uid))
        found[pod["spec"]["nodeName"]] = int(said.strip() or "1")  # no answer is not nothing
    return found


def stored(installed: Installed, uid: str) -> list[str]:
    """Names of the objects of that job in S3."""
    client = boto3.session.Session().client(
        "s3",
        endpoint_url=installed.facts.s3_endpoint,
        region_name="us-east-1",
        aws_access_key_id=s3_server.ACCESS_KEY,
        aws_secret_access_key=s3_server.SECRET_KEY,
    )
    try:
        answer = client.list_objects_v2(Bucket=s3_server.BUCKET, Prefix=f"{BUCKET_PREFIX}/{uid}/")
        return [str(one.get("Key", "")) for one in answer.get("Contents", [])]
    finally:
        client.close()


def tried_as(job: Job, installed: Installed, uid: str) -> dict[str, str]:
    """From within a worker of `job`, with its own account: reading, writing and deleting what belongs to job `uid`."""
    hosts = [pod["status"]["podIP"] for pod in installed.pods("memory-tier")]
    pod = job.pod_of(0)["metadata"]["name"]
    command = ["exec", pod, "--container=trainer", "--", "python", "-c", _TRY, uid, *hosts]
    said = installed.kubectl(*command, namespace=job.space.name)
    found: dict[str, str] = json.loads(said)
    return found
