"""What prefill and decode workers share: the front process, the engine process, and the local link between them."""
