"""The Fabric protocol on Kubernetes: workers are pods, holders the memory tier's DaemonSet, the job a custom resource.

`api` speaks to the API server, `cache` knows what stands there, `pods`, `pod_observations` and `status_patch` are pure, `api_writes` writes,
`kubernetes_fabric` joins them. Deciding is not done here.
"""
