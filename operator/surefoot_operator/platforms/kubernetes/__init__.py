"""Implements the Fabric protocol on Kubernetes.

`api` calls the API server, `cluster_cache` mirrors its objects, `pods`, `observations` and `status_patch` are pure,
`api_writes` writes, `platform` joins them. It decides nothing.
"""
