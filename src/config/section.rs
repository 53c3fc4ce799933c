//! What makes a plain struct a section of the configuration: the names of its keys and what they mean, taken
//! from the struct itself, so that help and code cannot drift apart.

use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Map, Value};

/// A struct whose fields are the keys of one section. [`section!`] implements it.
pub(super) trait Section: Default + Serialize + DeserializeOwned {
    /// Each field with the lines of its documentation, in the order of the struct.
    const KEYS: &'static [(&'static str, &'static [&'static str])];
}

/// Takes a struct as it is and makes it a [`Section`] too.
macro_rules! section {
    (
        $(#[$attribute:meta])*
        pub struct $name:ident {
            $(
                $(#[doc = $doc:literal])+
                $(#[serde($($serde:tt)*)])?
                pub $field:ident: $type:ty,
            )+
        }
    ) => {
        $(#[$attribute])*
        pub struct $name {
            $(
                $(#[doc = $doc])+
                $(#[serde($($serde)*)])?
                pub $field: $type,
            )+
        }

        impl $crate::config::section::Section for $name {
            const KEYS: &'static [(&'static str, &'static [&'static str])] =
                &[$((stringify!($field), &[$($doc),+])),+];
        }
    };
}
pub(super) use section;

/// A section among the others, its type forgotten.
pub(super) struct SectionKind {
    /// Name in the file, and the first part of its keys.
    pub(super) name: &'static str,
    /// See [`Section::KEYS`].
    pub(super) keys: &'static [(&'static str, &'static [&'static str])],
    /// Tries a single value; the error says what is wrong with it.
    pub(super) try_value: fn(&str, Value) -> Result<(), String>,
}

impl SectionKind {
    pub(super) const fn of<S: Section>(name: &'static str) -> Self {
        Self { name, keys: S::KEYS, try_value: try_value::<S> }
    }

    /// The documentation of a key as one line.
    pub(super) fn doc(&self, key: &str) -> Option<String> {
        let (_, lines) = self.keys.iter().find(|(name, _)| *name == key)?;
        Some(lines.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" "))
    }
}

fn try_value<S: Section>(key: &str, value: Value) -> Result<(), String> {
    let one = Value::Object(Map::from_iter([(key.to_owned(), value)]));
    serde_json::from_value::<S>(one).map(drop).map_err(|error| error.to_string())
}
