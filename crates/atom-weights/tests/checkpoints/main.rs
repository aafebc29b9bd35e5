//! Whole checkpoints, good and bad: one binary, so that it links once.

#![allow(clippy::unwrap_used, reason = "the exemption for tests stops at their helper functions")]

mod common;
mod configs;
mod expert_configs;
mod expert_files;
mod folders;
mod fp8;
mod gguf_models;
mod hostile;
