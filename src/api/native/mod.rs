//! `holdfast.v1` on the wire: each call is decoded, made once, and its outcome encoded.
//!
//! `codec` and `wire` read and write the hot calls, `convert` the others, `status` errors of all.

mod admin;
mod broker;
mod codec;
mod convert;
pub(super) mod status;
mod stream;
mod wire;

pub(super) use admin::AdminApi;
pub(super) use broker::{BrokerApi, Caller};
pub(super) use stream::StreamLimits;
