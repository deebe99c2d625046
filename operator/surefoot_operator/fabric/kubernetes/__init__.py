"""Implements the Fabric protocol on Kubernetes.

`api` calls the API server, `cache` mirrors its objects, `pods`, `pod_observations` and `status_patch` are pure,
`api_writes` writes, `kubernetes_fabric` joins them. It decides nothing.
"""
