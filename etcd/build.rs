//! Generates the gRPC code with the protoc that a crate carries, so that nothing needs installing.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let protoc = protoc_bin_vendored::protoc_bin_path()?;
    println!("cargo:rerun-if-changed=proto");
    let mut prost = tonic_prost_build::Config::new();
    prost.protoc_executable(protoc);
    prost.bytes(["."]);
    tonic_prost_build::configure()
        .build_server(false)
        .compile_with_config(prost, &["proto/etcd.proto"], &["proto"])?;
    Ok(())
}
