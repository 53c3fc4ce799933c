//! Which tags a consumer wants, and the hashes that indexes keep instead of texts.

use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use super::{Invalid, TopicId, envelope::check_tag};

/// Most tags of one filter.
pub const MAX_FILTER_TAGS: usize = 64;
/// Longest filter in bytes.
pub const MAX_FILTER_BYTES: usize = 4096;

const FIELD: &str = "tag_filter";

/// A checked tag expression: all messages, or those with one of some tags. One word while it waits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TagFilter(Option<Box<Tags>>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Tags {
    hashes: Vec<u64>,
    tags: Vec<Box<str>>,
}

impl TagFilter {
    /// Reads `*` or nothing (all messages), or tags as in `paid || shipped`. The error names the place.
    pub fn parse(expression: &str) -> Result<Self, Invalid> {
        if expression.len() > MAX_FILTER_BYTES {
            let problem = format!("has {} bytes, over the limit of {MAX_FILTER_BYTES}", expression.len());
            return Err(Invalid::new(FIELD, problem));
        }
        if matches!(expression.trim(), "" | "*") {
            return Ok(Self(None));
        }
        let mut wanted = Tags { hashes: Vec::new(), tags: Vec::new() };
        let mut at = 0_usize;
        for part in expression.split("||") {
            let tag = part.trim();
            let place =
                at.saturating_add(part.len().saturating_sub(part.trim_start().len())).saturating_add(1);
            let fault = |problem: &str| Err(Invalid::new(FIELD, format!("at byte {place}: {problem}")));
            if tag.is_empty() {
                return fault("a tag is missing; write tags as in `paid || shipped`");
            }
            if tag == "*" {
                return fault("`*` stands for all messages and stands alone");
            }
            if let Err(invalid) = check_tag(FIELD, tag) {
                return fault(&invalid.problem);
            }
            if !wanted.tags.iter().any(|known| **known == *tag) {
                wanted.hashes.push(tag_hash(Some(tag)));
                wanted.tags.push(tag.into());
            }
            if wanted.tags.len() > MAX_FILTER_TAGS {
                return fault(&format!("more than {MAX_FILTER_TAGS} tags; use fewer, or `*`"));
            }
            at = at.saturating_add(part.len()).saturating_add(2);
        }
        wanted.hashes.shrink_to_fit();
        wanted.tags.shrink_to_fit();
        Ok(Self(Some(Box::new(wanted))))
    }

    /// Whether every message is wanted, so that there is nothing to check.
    pub fn is_all(&self) -> bool {
        self.0.is_none()
    }

    /// Whether a message may be wanted whose tag has this [`tag_hash`]. Hashes collide: check the tag itself.
    pub fn wants_hash(&self, hash: u64) -> bool {
        self.0.as_ref().is_none_or(|wanted| wanted.hashes.contains(&hash))
    }

    /// Whether a message with this tag is wanted. One without a tag only when all are.
    pub fn wants_tag(&self, tag: Option<&str>) -> bool {
        match (&self.0, tag.map(str::trim)) {
            (None, _) => true,
            (Some(_), None) => false,
            (Some(wanted), Some(tag)) => wanted.tags.iter().any(|known| **known == *tag),
        }
    }
}

/// What indexes keep of a tag: 0 for none, never 0 for one. Spaces around a tag do not count, as in filters.
pub fn tag_hash(tag: Option<&str>) -> u64 {
    tag.map_or(0, |tag| xxh3_64(tag.trim().as_bytes()).max(1))
}

/// What places a message group in a queue map: XXH3 (64 bits) of its bytes, for a jump consistent hash. A
/// producer that chooses the queue itself uses the same.
pub fn group_hash(group: &str) -> u64 {
    xxh3_64(group.as_bytes())
}

/// What a message is looked up by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LookupKind {
    /// Its id.
    Id,
    /// One of its keys.
    Key,
}

/// What the key index keeps of an id or key. Each topic and kind hashes differently.
pub fn lookup_hash(topic: TopicId, kind: LookupKind, key: &str) -> u64 {
    let kind = match kind {
        LookupKind::Id => 0,
        LookupKind::Key => 1,
    };
    xxh3_64_with_seed(key.as_bytes(), topic.0 << 1 | kind)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn nothing_and_a_star_stand_for_all() {
        for all in ["", " ", "*", " * "] {
            let filter = TagFilter::parse(all).unwrap();
            assert!(filter.is_all() && filter.wants_hash(0) && filter.wants_tag(None), "{all:?}");
        }
    }

    #[test]
    fn tags_are_trimmed_and_compared_exactly() {
        let filter = TagFilter::parse(" paid||shipped ||paid").unwrap();
        assert!(filter.wants_tag(Some("paid")) && filter.wants_tag(Some("shipped")));
        assert!(filter.wants_tag(Some(" paid ")), "a tag with spaces around it can be asked for");
        assert!(filter.wants_hash(tag_hash(Some(" paid "))));
        assert!(!filter.wants_tag(Some("Paid")) && !filter.wants_tag(Some("paid2")));
        assert!(!filter.wants_tag(None) && !filter.wants_hash(tag_hash(None)), "no tag is no match");
    }

    #[test]
    fn equal_java_hashes_are_no_match() {
        let filter = TagFilter::parse("Aa").unwrap();
        assert!(!filter.wants_tag(Some("BB")));
    }

    #[test]
    fn an_error_names_its_place() {
        for (bad, place) in [
            ("a||", "at byte 4"),
            ("||", "at byte 1"),
            ("||a", "at byte 1"),
            ("*||a", "at byte 1"),
            ("a|| *", "at byte 5"),
            ("a|b", "at byte 1"),
            ("a||b\u{7}", "at byte 4"),
        ] {
            let problem = TagFilter::parse(bad).unwrap_err().problem;
            assert!(problem.starts_with(place), "{bad:?}: {problem}");
        }
    }

    #[test]
    fn a_filter_is_bounded() {
        let tags = |n: usize| (0..n).map(|i| i.to_string()).collect::<Vec<_>>().join("||");
        assert!(TagFilter::parse(&tags(MAX_FILTER_TAGS)).is_ok());
        assert!(TagFilter::parse(&tags(MAX_FILTER_TAGS + 1)).is_err());
        assert!(TagFilter::parse(&" ".repeat(MAX_FILTER_BYTES + 1)).is_err());
        assert!(TagFilter::parse(&"t".repeat(129)).is_err());
    }

    #[test]
    fn a_look_up_stays_within_its_topic_and_kind() {
        let hashes = [
            lookup_hash(TopicId(1), LookupKind::Id, "x"),
            lookup_hash(TopicId(1), LookupKind::Key, "x"),
            lookup_hash(TopicId(2), LookupKind::Id, "x"),
        ];
        assert!(hashes[0] != hashes[1] && hashes[0] != hashes[2]);
    }

    proptest! {
        #[test]
        fn a_filter_wants_its_own_tags_and_no_others(
            tags in proptest::collection::hash_set("[a-zé*]{2,6}", 1..20),
            other in "[a-zé]{7,9}",
        ) {
            let expression = tags.iter().cloned().collect::<Vec<_>>().join(" || ");
            let filter = TagFilter::parse(&expression).unwrap();
            for tag in &tags {
                prop_assert!(filter.wants_tag(Some(tag)) && filter.wants_hash(tag_hash(Some(tag))));
            }
            prop_assert!(!filter.wants_tag(Some(&other)));
        }

        #[test]
        fn no_text_makes_it_panic(text in ".{0,80}|[|* a]{0,20}") {
            let _ = TagFilter::parse(&text);
        }
    }
}
