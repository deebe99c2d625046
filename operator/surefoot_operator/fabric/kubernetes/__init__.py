"""Implements the Fabric protocol on Kubernetes.

`api` speaks to the API server, `cache` knows what stands there, `pods`, `pod_observations` and `status_patch` are
pure, `api_writes` writes, `kubernetes_fabric` joins them. Deciding is not done here.
"""
