use super::*;
use crate::KeyRef;
use proptest::prelude::*;

/// `hashlib.sha256(b'kvpool').hexdigest()`
const HEX: &str = "762bbe1c0856477b9498ff0c22e77ca4fe7873d868662dc00322f22fc0a20398";

fn digest() -> crate::key::Digest {
    match crate::Key::parse(HEX).unwrap().as_ref() {
        KeyRef::Digest { digest, .. } => *digest,
        KeyRef::Text(_) => unreachable!(),
    }
}

fn pool_key() -> PoolKey {
    PoolKey {
        model: "meta/Llama-3".into(),
        pcp: 0,
        dcp: 1,
        head_or_tp_rank: 2,
        pp_rank: Some(3),
        hash: digest(),
        layer: None,
    }
}

fn lmcache_key() -> LmcacheKey {
    LmcacheKey {
        model: "meta/Llama-3".into(),
        world_size: 8,
        worker_id: 7,
        hash_hex: HEX.into(),
        dtype: "bfloat16".into(),
        layer: None,
        tags: Vec::new(),
    }
}

#[test]
fn vllm_keys_have_their_documented_form() {
    let mut key = VllmKey {
        model: "meta/Llama-3".into(),
        world_size: 8,
        worker_id: 7,
        hash: 0xab,
        layer: None,
    };
    assert_eq!(
        key.build().unwrap(),
        "vllm@meta_Llama-3@8@7@00000000000000ab"
    );
    key.layer = Some(31);
    let text = key.build().unwrap();
    assert_eq!(text, "vllm@meta_Llama-3@8@7@00000000000000ab@31");
    assert_eq!(key.to_key().unwrap().to_string(), text);
}

#[test]
fn pool_keys_have_their_documented_form() {
    let mut key = pool_key();
    assert_eq!(
        key.build().unwrap(),
        format!("meta/Llama-3@pcp0@dcp1@head_or_tp_rank:2@pp_rank:3@{HEX}")
    );
    key.layer = Some(4);
    assert_eq!(
        key.build().unwrap(),
        format!("meta/Llama-3@pcp0@dcp1@head_or_tp_rank:2@pp_rank:3@{HEX}@4")
    );
    key.pp_rank = None;
    assert_eq!(
        key.build().unwrap(),
        format!("meta/Llama-3@pcp0@dcp1@head_or_tp_rank:2@{HEX}@4")
    );
    key.layer = None;
    assert!(matches!(
        key.build(),
        Err(KeyStringError::Missing {
            field: "pp_rank",
            ..
        })
    ));
}

#[test]
fn lmcache_keys_have_their_documented_form() {
    let mut key = lmcache_key();
    assert_eq!(
        key.build().unwrap(),
        format!("meta/Llama-3@8@7@{HEX}@bfloat16")
    );
    key.tags = vec![
        ("user".into(), "a%b".into()),
        ("empty".into(), String::new()),
    ];
    assert_eq!(
        key.build().unwrap(),
        format!("meta/Llama-3@8@7@{HEX}@bfloat16@user%a%b@empty%")
    );
    key.layer = Some(0);
    let text = format!("meta/Llama-3@8@7@{HEX}@bfloat16@0@user%a%b@empty%");
    assert_eq!(key.build().unwrap(), text);
    assert_eq!(LmcacheKey::parse(&text).unwrap(), key);
}

/// The directory's budget for each block holds for digest keys only, so these keys must be digest
/// keys.
#[test]
fn keys_over_a_sha256_are_held_as_a_digest_between_affixes() {
    let mut pool = pool_key();
    pool.layer = Some(4);
    let mut lmcache = lmcache_key();
    lmcache.tags = vec![("user".into(), "a".into())];
    for (key, before, after) in [
        (
            pool.to_key().unwrap(),
            "meta/Llama-3@pcp0@dcp1@head_or_tp_rank:2@pp_rank:3@",
            "@4",
        ),
        (
            lmcache.to_key().unwrap(),
            "meta/Llama-3@8@7@",
            "@bfloat16@user%a",
        ),
    ] {
        assert_eq!(
            key.as_ref(),
            KeyRef::Digest {
                prefix: before,
                suffix: after,
                digest: &digest()
            }
        );
    }
    let mut short = lmcache_key();
    short.hash_hex = "00000000000000ab".into();
    assert!(matches!(
        short.to_key().unwrap().as_ref(),
        KeyRef::Text("meta/Llama-3@8@7@00000000000000ab@bfloat16")
    ));
}

fn field<T: std::fmt::Debug>(outcome: Result<T, KeyStringError>) -> String {
    match outcome.unwrap_err() {
        KeyStringError::Missing { field, .. } => format!("missing {field}"),
        KeyStringError::BadField { field, .. } => format!("bad {field}"),
        KeyStringError::Trailing { value, .. } => format!("trailing {value}"),
        KeyStringError::NoKey { source, .. } => source.to_string(),
    }
}

#[test]
fn a_bad_vllm_key_is_refused_by_its_field() {
    for (text, wrong) in [
        ("", "bad engine"),
        ("sglang@m@1@0@00000000000000ab", "bad engine"),
        ("vllm", "missing model"),
        ("vllm@@1@0@00000000000000ab", "bad model"),
        ("vllm@a/b@1@0@00000000000000ab", "bad model"),
        ("vllm@m@x@0@00000000000000ab", "bad world size"),
        ("vllm@m@1@00@00000000000000ab", "bad worker id"),
        ("vllm@m@1@4294967296@00000000000000ab", "bad worker id"),
        ("vllm@m@1@0", "missing hash"),
        ("vllm@m@1@0@ab", "bad hash"),
        ("vllm@m@1@0@00000000000000AB", "bad hash"),
        ("vllm@m@1@0@+0000000000000ab", "bad hash"),
        ("vllm@m@1@0@00000000000000ab@", "bad layer"),
        ("vllm@m@1@0@00000000000000ab@+1", "bad layer"),
        ("vllm@m@1@0@00000000000000ab@1@2", "trailing 2"),
    ] {
        assert_eq!(field(VllmKey::parse(text)), wrong, "{text}");
    }
}

#[test]
fn a_bad_pool_key_is_refused_by_its_field() {
    for (text, wrong) in [
        ("".to_owned(), "bad model"),
        ("m".to_owned(), "missing pcp"),
        ("m@0".to_owned(), "bad pcp"),
        ("m@pcp0@dcp".to_owned(), "bad dcp"),
        ("m@pcp0@dcp0@tp_rank:0".to_owned(), "bad head_or_tp_rank"),
        (
            "m@pcp0@dcp0@head_or_tp_rank:0".to_owned(),
            "missing pp_rank",
        ),
        (
            "m@pcp0@dcp0@head_or_tp_rank:0@pp_rank:x".to_owned(),
            "bad pp_rank",
        ),
        (
            "m@pcp0@dcp0@head_or_tp_rank:0@pp_rank:0".to_owned(),
            "missing hash",
        ),
        (
            format!("m@pcp0@dcp0@head_or_tp_rank:0@pp_rank:0@{}", &HEX[1..]),
            "bad hash",
        ),
        (
            format!("m@pcp0@dcp0@head_or_tp_rank:0@pp_rank:0@{HEX}0"),
            "bad hash",
        ),
        (
            format!("m@pcp0@dcp0@head_or_tp_rank:0@{HEX}"),
            "missing pp_rank",
        ),
        (
            format!("m@pcp0@dcp0@head_or_tp_rank:0@pp_rank:0@{HEX}@x"),
            "bad layer",
        ),
        (
            format!("m@pcp0@dcp0@head_or_tp_rank:0@pp_rank:0@{HEX}@1@y"),
            "trailing y",
        ),
    ] {
        assert_eq!(field(PoolKey::parse(&text)), wrong, "{text}");
    }
}

#[test]
fn a_bad_lmcache_key_is_refused_by_its_field() {
    for (text, wrong) in [
        ("", "bad model"),
        ("m", "missing world size"),
        ("m@1@-1@ab@half", "bad worker id"),
        ("m@1@0@xy@half", "bad hash"),
        ("m@1@0@@half", "bad hash"),
        ("m@1@0@ab", "missing dtype"),
        ("m@1@0@ab@", "bad dtype"),
        ("m@1@0@ab@half@x", "bad layer"),
        ("m@1@0@ab@half@%v", "bad tag"),
        ("m@1@0@ab@half@1@2", "bad tag"),
        ("m@1@0@ab@half@k%v@1", "bad tag"),
    ] {
        assert_eq!(field(LmcacheKey::parse(text)), wrong, "{text}");
    }
}

#[test]
fn fields_that_would_not_parse_back_are_not_built() {
    for model in ["", "a@b"] {
        let mut pool = pool_key();
        pool.model = model.into();
        assert_eq!(field(pool.build()), "bad model");
        let mut lmcache = lmcache_key();
        lmcache.model = model.into();
        assert_eq!(field(lmcache.build()), "bad model");
        let vllm = VllmKey {
            model: model.into(),
            world_size: 1,
            worker_id: 0,
            hash: 0,
            layer: None,
        };
        assert_eq!(field(vllm.build()), "bad model");
    }
    for (tag, value) in [("", "v"), ("a%b", "v"), ("a@b", "v"), ("a", "@")] {
        let mut key = lmcache_key();
        key.tags = vec![(tag.into(), value.into())];
        assert_eq!(field(key.build()), "bad tag");
    }
    let mut key = lmcache_key();
    key.hash_hex = "AB".into();
    assert_eq!(field(key.build()), "bad hash");
    key = lmcache_key();
    key.dtype = "m".repeat(1024);
    assert!(field(key.build()).contains("1024"));
    assert!(field(LmcacheKey::parse(&"m".repeat(1025))).contains("1025"));
}

proptest! {
    #[test]
    fn vllm_keys_round_trip(
        model in "[^@/]{1,40}", world_size: u32, worker_id: u32, hash: u64, layer: Option<u32>,
    ) {
        let key = VllmKey { model, world_size, worker_id, hash, layer };
        prop_assert_eq!(VllmKey::parse(&key.build().unwrap()), Ok(key));
    }

    #[test]
    fn pool_keys_round_trip(
        model in "[^@]{1,40}", pcp: u32, dcp: u32, head_or_tp_rank: u32, pp_rank: u32, hash: [u8; 32],
        layer: Option<u32>, leave_out: bool,
    ) {
        let pp_rank = (!(leave_out && layer.is_some())).then_some(pp_rank);
        let key = PoolKey { model, pcp, dcp, head_or_tp_rank, pp_rank, hash, layer };
        prop_assert_eq!(PoolKey::parse(&key.build().unwrap()), Ok(key));
    }

    #[test]
    fn lmcache_keys_round_trip(
        model in "[^@]{1,40}", world_size: u32, worker_id: u32, hash_hex in "[0-9a-f]{1,70}",
        dtype in "[^@]{1,10}", layer: Option<u32>,
        tags in prop::collection::vec(("[^@%]{1,8}", "[^@]{0,8}"), 0..3),
    ) {
        let key = LmcacheKey { model, world_size, worker_id, hash_hex, dtype, layer, tags };
        prop_assert_eq!(LmcacheKey::parse(&key.build().unwrap()), Ok(key));
    }

    #[test]
    fn a_parsed_key_builds_the_same_string(
        text in "(vllm@)?m(@(pcp|dcp|head_or_tp_rank:|pp_rank:)?(0|1|7|01|a%b|[0-9a-f]{16}|[0-9a-f]{64})){3,8}",
    ) {
        if let Ok(key) = VllmKey::parse(&text) {
            prop_assert_eq!(key.build(), Ok(text.clone()));
        }
        if let Ok(key) = PoolKey::parse(&text) {
            prop_assert_eq!(key.build(), Ok(text.clone()));
        }
        if let Ok(key) = LmcacheKey::parse(&text) {
            prop_assert_eq!(key.build(), Ok(text.clone()));
        }
    }

    #[test]
    fn no_string_makes_a_parser_panic(text: String) {
        let _ = (VllmKey::parse(&text), PoolKey::parse(&text), LmcacheKey::parse(&text));
    }
}
