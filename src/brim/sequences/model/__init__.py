"""The CNN→LSTM network."""
