"""What stages and gateways say to each other over the network; torch-free, so the gateway can import it."""
