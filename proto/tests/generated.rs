//! The generated code in the repository is what the `.proto` files give.
//!
//! After a change of a `.proto` file, `KVPOOL_GENERATE=1 cargo test -p kvpool-proto --test generated` writes the code
//! anew.

use std::path::Path;

/// Generates the code of `protos` in `crate_dir` and compares it with `src/generated/{name}`, or writes it there.
fn check(crate_dir: &Path, protos: &[&str], name: &str, server: bool) {
    let out = tempfile::tempdir().unwrap();
    let mut prost = tonic_prost_build::Config::new();
    prost.protoc_executable(protoc_bin_vendored::protoc_bin_path().unwrap());
    prost.bytes(["."]);
    // They carry tokens, secrets and keys, which no log may show. `src/lib.rs` prints them without.
    prost.skip_debug([
        "kvpool.v1.HelloRequest",
        "kvpool.v1.RenewToken",
        "kvpool.v1.Register",
        "kvpool.v1.Welcome",
    ]);
    let proto_dir = crate_dir.join("proto");
    let protos: Vec<_> = protos.iter().map(|proto| proto_dir.join(proto)).collect();
    tonic_prost_build::configure()
        .build_server(server)
        .emit_rerun_if_changed(false)
        .out_dir(out.path())
        .compile_with_config(prost, &protos, &[proto_dir])
        .unwrap();
    let fresh = std::fs::read_to_string(out.path().join(name)).unwrap();
    let kept = crate_dir.join("src/generated").join(name);
    if std::env::var_os("KVPOOL_GENERATE").is_some() {
        std::fs::write(&kept, &fresh).unwrap();
    }
    let is_fresh = std::fs::read_to_string(&kept).unwrap_or_default() == fresh;
    assert!(
        is_fresh,
        "{} is not what its .proto files give; run \
         `KVPOOL_GENERATE=1 cargo test -p kvpool-proto --test generated` and commit the result",
        kept.display()
    );
}

#[test]
fn the_code_of_the_pool_and_of_etcd_is_what_their_proto_files_give() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    check(here, &["pool.proto", "nodes.proto"], "kvpool.v1.rs", true);
    let etcd = here.join("../etcd");
    check(&etcd, &["etcd.proto"], "etcdserverpb.rs", false);
}
