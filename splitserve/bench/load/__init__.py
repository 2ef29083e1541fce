"""Load for any server with OpenAI's API: streams, bursts and arrivals, and what came of them."""
