"""Implements the Platform protocol on Kubernetes.

`api_client` calls the API server, `api_writes` writes objects, and `cluster_cache` mirrors them. `pods` builds pods and
`observations` converts objects for plans, both pure. `platform` combines them.
"""
