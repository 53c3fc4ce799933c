//! What is wrong with a value that came from outside.

/// A value that breaks a rule: which field, and what rule, in words for the person who sent it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct Invalid {
    /// Path of the field as the API names it, e.g. `messages[3].body`.
    pub field: String,
    /// The rule, the limit, what was seen and what to do.
    pub problem: String,
}

impl Invalid {
    /// A broken rule at `field`.
    pub fn new(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self { field: field.into(), problem: problem.into() }
    }

    /// The same, seen from one level further out: `body` within `messages[3]` is `messages[3].body`.
    #[must_use]
    pub fn within(mut self, outer: &str) -> Self {
        self.field = format!("{outer}.{}", self.field);
        self
    }
}
