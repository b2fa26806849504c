"""Ways to move weights from a trainer into a running engine."""
from vime.weights.transports.base import Endpoint, Receiver, Sender, open_receiver, open_sender

__all__ = ["Endpoint", "Receiver", "Sender", "open_receiver", "open_sender"]
