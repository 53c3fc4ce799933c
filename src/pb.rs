//! Code generated from `proto/` by `build.rs`; nothing by hand.

/// `holdfast.v1`, the native API.
#[allow(missing_docs, clippy::all, clippy::pedantic)]
pub mod v1 {
    tonic::include_proto!("holdfast.v1");
}

/// The descriptors of all of `proto/`, for reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
