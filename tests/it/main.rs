//! The real binary, driven through gRPC as its users drive it. Each test's name is the claim it checks.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

#[path = "../harness/mod.rs"]
mod harness;

mod cli;
mod cli_admin;
mod cli_lines;
mod connections;
mod damage;
mod fuzz;
mod groups;
mod hold;
mod idle;
mod names;
mod offsets;
mod overload;
mod pull;
mod query;
mod restart;
mod send;
mod send_limits;
mod shutdown;
mod stream;
mod topics;
mod wire;
