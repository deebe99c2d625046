"""Implements the Fabric protocol on Kubernetes.

`api_client` calls the API server, `api_writes` writes, `cluster_cache` mirrors its objects; `pods` and `observations` are
pure, `platform` joins them. It decides nothing.
"""
