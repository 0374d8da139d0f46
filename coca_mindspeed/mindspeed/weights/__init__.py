"""Weights on disk and between engines: conversion, layouts, checkpoints."""
