//! The encoded message, read just as far as the broker needs.

use bytes::BytesMut;

/// A checked message.
#[derive(Clone, Debug)]
pub struct Envelope;
/// Fields that the broker adds.
#[derive(Clone, Debug)]
pub struct ServerFields;
/// Appends.
pub fn append_server_fields(_fields: &ServerFields, _into: &mut BytesMut) {}
