//! Which tags a consumer wants.

/// A checked tag expression.
#[derive(Clone, Debug)]
pub struct TagFilter;
