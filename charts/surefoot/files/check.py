"""What `helm test` runs in a pod: the operator answers, the CRD is served, the memory tier stands. Standard library only.

Each check is asked again until it holds or the time is up; the last answer is then the sentence that is printed.
"""

import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request

FOLDER = "/var/run/secrets/kubernetes.io/serviceaccount"
NAMESPACE = os.environ["SUREFOOT_NAMESPACE"]
RELEASE = os.environ["SUREFOOT_RELEASE"]
OPERATOR = os.environ["SUREFOOT_OPERATOR"]
MEMORY = os.environ.get("SUREFOOT_MEMORY", "")
SHARDS = int(os.environ.get("SUREFOOT_SHARDS", "1"))
SECONDS = float(os.environ.get("SUREFOOT_TEST_SECONDS", "120"))
CALL_SECONDS = 5
AGAIN_SECONDS = 1


def asked(path):
    with open(FOLDER + "/token") as file:
        token = file.read()
    tls = ssl.create_default_context(cafile=FOLDER + "/ca.crt")
    tls.verify_flags &= ~getattr(ssl, "VERIFY_X509_STRICT", 0)  # an API server may sign its own certificate
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    host = f"[{host}]" if ":" in host else host
    request = urllib.request.Request(f"https://{host}:{port}{path}", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=CALL_SECONDS, context=tls) as answer:
        return json.load(answer)


def crd():
    """What is wrong with the CRD, or nothing."""
    kinds = [one["kind"] for one in asked("/apis/surefoot.dev/v1alpha1")["resources"]]
    return "" if "TrainingJob" in kinds else f"surefoot.dev/v1alpha1 serves {kinds} and no TrainingJob: install the CRD"


def operator():
    """Every pod of the Deployment is ready, and each says so itself; exactly one leads each shard."""
    wanted = asked(f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/{OPERATOR}")["spec"]["replicas"]
    query = f"labelSelector=surefoot.dev%2Fpart%3Doperator,app.kubernetes.io%2Finstance%3D{RELEASE}"
    pods = asked(f"/api/v1/namespaces/{NAMESPACE}/pods?{query}")["items"]
    pods = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
    for pod in pods:
        name, address = pod["metadata"]["name"], pod["status"].get("podIP")
        if not address:
            return f"operator pod {name} has no address yet: it is {pod['status'].get('phase')}"
        address = f"[{address}]" if ":" in address else address
        with urllib.request.urlopen(f"http://{address}:8081/readyz", timeout=CALL_SECONDS):
            pass
    if len(pods) != wanted:
        return f"{len(pods)} of {wanted} operator pods are there"
    for shard in range(SHARDS):
        label = f"surefoot.dev/leads-shard-{shard}" if shard else "surefoot.dev/leader"
        leaders = [pod["metadata"]["name"] for pod in pods if pod["metadata"]["labels"].get(label) == "true"]
        if len(leaders) != 1:
            of = f" shard {shard}" if SHARDS > 1 else ""
            return f"of the operator's pods {len(leaders)} lead{of}: {leaders}"
    return ""


def memory_tier():
    """Ready on every node it is wanted on."""
    status = asked(f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets/{MEMORY}")["status"]
    wanted, ready = status.get("desiredNumberScheduled", 0), status.get("numberReady", 0)
    if wanted == 0:
        return "no node is chosen by memoryTier.nodeSelector and memoryTier.tolerations: no checkpoint has a place in memory"
    return "" if ready == wanted else f"the memory tier is ready on {ready} of {wanted} nodes"


def said(check):
    try:
        return check()
    except urllib.error.HTTPError as error:
        return f"{error.url} answers {error.code} {error.reason}"
    except (OSError, ValueError, KeyError) as error:
        return f"{type(error).__name__}: {error}"


def main():
    deadline = time.monotonic() + SECONDS
    checks = {"CRD": crd, "operator": operator}
    if MEMORY:
        checks["memory tier"] = memory_tier
    failed = 0
    for name, check in checks.items():
        problem = said(check)
        while problem and time.monotonic() < deadline:
            time.sleep(AGAIN_SECONDS)  # between two questions; the condition is the answer
            problem = said(check)
        failed += bool(problem)
        sys.stdout.write(f"{name}: {problem or 'well'}\n")
        sys.stdout.flush()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
