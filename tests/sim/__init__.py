"""The model engine, simulations of failing media and streams, and the fakes that they share."""
