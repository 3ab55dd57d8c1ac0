module decodeloop

go 1.23

require (
	github.com/x448/float16 v0.8.4
	github.com/yalue/onnxruntime_go v1.27.0
)
