"""Weights: conversion between Hugging Face and Megatron, checkpoint layouts, retention."""
