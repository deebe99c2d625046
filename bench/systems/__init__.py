"""One file a system: how its users save with it, wait for it, and load from it. `system.System` is the surface."""

SYSTEMS = {
    "surefoot": "surefoot:Surefoot",
    "torch.save": "torch_save:TorchSave",
    "torch.save paced": "paced_store:PacedTorchSave",
    "dcp.save": "dcp:DcpSave",
    "dcp.async_save": "dcp:DcpThread",
    "dcp.async_save stager": "dcp:DcpStager",
    "dcp.async_save process": "dcp:DcpProcess",
    "torchsnapshot": "torchsnapshot:TorchSnapshot",
    "torch_checkpointing": "torch_checkpointing:TorchCheckpointing",
    "sagemaker": "sagemaker:SageMaker",
}
"""Name → module of this package and class."""
UNPREPARED = "surefoot unprepared"
ASIDE = {UNPREPARED: "surefoot:Unprepared"}
"""Measured in sections of their own."""
