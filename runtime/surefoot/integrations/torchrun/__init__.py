"""torchrun's rendezvous, by a coordinator: its workers start when an epoch names them."""
