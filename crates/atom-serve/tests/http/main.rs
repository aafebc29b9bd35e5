//! The whole server over a loopback socket, in front of an engine that plays scripts.

// All of it is test code, where a surprise may end the test.
#![allow(clippy::unwrap_used)]

mod admin;
mod answers;
mod bad_input;
mod client;
mod constraints;
mod equality;
mod fake;
mod lifecycle;
mod scoring;
mod status;
mod streams;
