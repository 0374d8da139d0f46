"""From a publisher's file to a data set that can be trained on: filtered, checked, written whole or not at all."""
