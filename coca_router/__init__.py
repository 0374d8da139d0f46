"""Routing by the stated confidence: a proxy, a server of one model, replay from stored predictions, calibration."""
