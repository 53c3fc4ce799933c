//! Every key with its value, default, origin and meaning.

use serde::Serialize;

use super::{
    Config, Loaded, SECTIONS,
    loader::{at, nearest_key, show, variable},
};

/// A key as people are told about it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Explained {
    /// `section.key`.
    pub key: String,
    /// In use, as it is written in a file.
    pub value: String,
    /// What it would be if nobody had set it.
    pub default: String,
    /// Where the value is from: `default`, `FILE:LINE`, `env NAME` or `flag NAME`.
    pub origin: String,
    /// The variable that sets it.
    pub variable: String,
    /// What it does.
    pub doc: String,
}

/// Explains the keys that are `wanted` or begin with it as a section; all for `None`. The error names the
/// nearest key.
pub fn explain(loaded: &Loaded, defaults: &Config, wanted: Option<&str>) -> Result<Vec<Explained>, String> {
    let values = serde_json::to_value(&loaded.config).unwrap_or_default();
    let defaults = serde_json::to_value(defaults).unwrap_or_default();
    let mut found = Vec::new();
    for section in SECTIONS {
        for &(field, _) in section.keys {
            let key = format!("{}.{field}", section.name);
            if wanted.is_some_and(|wanted| wanted != key && wanted != section.name) {
                continue;
            }
            found.push(Explained {
                value: show(at(&values, section.name, field)),
                default: show(at(&defaults, section.name, field)),
                origin: loaded.origins.get(&key).cloned().unwrap_or_default().to_string(),
                variable: variable(&key),
                doc: section.doc(field).unwrap_or_default(),
                key,
            });
        }
    }
    match wanted {
        Some(wanted) if found.is_empty() => {
            let nearest =
                nearest_key(wanted).map(|key| format!("; did you mean `{key}`?")).unwrap_or_default();
            Err(format!("there is no configuration key `{wanted}`{nearest}"))
        }
        _ => Ok(found),
    }
}

#[cfg(test)]
mod tests {
    use super::{super::*, *};

    #[test]
    fn a_key_is_explained_with_value_default_origin_and_meaning() {
        let mut layers = Layers::default();
        layers.set("store.segment_size=64 MiB").unwrap();
        let loaded = load(Role::Broker, &layers).unwrap();
        let defaults = Config::defaults(Role::Broker, &layers.environment);
        let explained = explain(&loaded, &defaults, Some("store.segment_size")).unwrap();
        assert_eq!(
            explained,
            [Explained {
                key: "store.segment_size".into(),
                value: "64MiB".into(),
                default: "256MiB".into(),
                origin: "flag --set".into(),
                variable: "HOLDFAST_STORE__SEGMENT_SIZE".into(),
                doc: "Size of a log segment; retention frees whole segments.".into(),
            }]
        );
        assert!(explain(&loaded, &defaults, None).unwrap().len() > 30);
        assert_eq!(explain(&loaded, &defaults, Some("listen")).unwrap().len(), 2);
        let error = explain(&loaded, &defaults, Some("store.segment_siz")).unwrap_err();
        assert_eq!(
            error,
            "there is no configuration key `store.segment_siz`; did you mean `store.segment_size`?"
        );
    }
}
